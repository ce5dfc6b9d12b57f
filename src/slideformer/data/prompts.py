"""What text is generated from: prompts as people give them, and their token ids.

A prompt is text, or a conversation that waits for an answer. With a chat template, text is what the user says, and the
template's own words for the beginning of an answer come behind it; without one, text is what the model goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError

from slideformer.data.files import read_file, suffix_of
from slideformer.data.formats import SPEAKERS
from slideformer.data.rows import Block, Message, RawRow
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput

Words = str | Sequence[Message]
"""Text, or messages of which the last is no answer."""

LAYOUTS = (
    '{"prompt": ...} (text or a list of messages), {"messages": [...]}, {"conversations": [...]}, '
    '{"instruction": ..., "input": ...} or {"text": ...}'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """words: as given, for people to see; ids: what the model gets."""

    words: Words
    ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """For people: the text, or the last message."""
        return self.words if isinstance(self.words, str) else str(self.words[-1].get("content") or "")


def read_prompts(path: Path) -> list[Words]:
    """Of a plain text file every line that has words, of any other file of rows every row.

    An answer at the end of a row is left out. Raises BadInput: a file that cannot be read, a row without a prompt, no
    prompts at all.
    """
    if suffix_of(path) == ".txt":
        blocks = (row.columns for row in read_file(path))
        text = "".join(block.text for block in blocks if isinstance(block, Block))
        found: list[Words] = [line.strip() for line in text.splitlines() if line.strip()]
    else:
        found = [_words(row) for row in read_file(path)]
    if not found:
        raise BadInput(f"{path} has no prompts: give one a line, or rows like {LAYOUTS}")
    return found


def encode_prompts(
    prompts: Sequence[Words], codec: Codec, *, chat: bool | None = None, system: str | None = None
) -> list[Prompt]:
    """Ids of every prompt. chat: whether text goes through the chat template; None: if there is one. system: a message
    before every conversation that has none. Raises BadInput: no template where one is needed, or one that refuses."""
    templated = codec.has_template if chat is None else chat
    if templated and not codec.has_template:
        raise BadInput(f"the tokenizer of {codec.name} has no chat template: leave --chat out, or put one there")
    if system is not None and not templated:
        raise BadInput("a system message needs a chat template, and text is not put into one here: leave --system out")
    return [_encode(number, words, codec, templated, system) for number, words in enumerate(prompts, 1)]


def _encode(number: int, words: Words, codec: Codec, templated: bool, system: str | None) -> Prompt:
    if isinstance(words, str) and not templated:
        ids = codec.encode(words)
        return Prompt(words, tuple(ids[: len(ids) - codec.num_added_behind]))
    if not codec.has_template:
        raise BadInput(
            f"prompt {number} is a conversation, but the tokenizer of {codec.name} has no chat template: give text"
        )
    messages = [{"role": "user", "content": words}] if isinstance(words, str) else list(words)
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    try:
        text = codec.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **codec.template_kwargs
        )
    except (TemplateError, TypeError, KeyError, IndexError) as error:
        raise BadInput(f"prompt {number}: the chat template of {codec.name} refuses it: {error}") from None
    return Prompt(words, tuple(codec.encode_bare(text)))


def _words(row: RawRow) -> Words:
    columns = row.columns
    if isinstance(columns, Block):
        raise BadInput(f"{row.where}: plain text is read from .txt files only, a prompt a line")
    prompt = columns.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    for name, value in (("prompt", prompt), *((n, columns.get(n)) for n in ("messages", "conversations"))):
        if value is not None:
            return _messages(row, name, value)
    instruction, further = columns.get("instruction"), columns.get("input")
    if isinstance(instruction, str) and instruction.strip():
        return f"{instruction}\n{further}" if isinstance(further, str) and further.strip() else instruction
    text = columns.get("text")
    if isinstance(text, str) and text.strip():
        return text
    found = ", ".join(map(str, columns)) or "none"
    raise BadInput(f"{row.where}: there is no prompt in its columns ({found}); accepted are {LAYOUTS}")


def _messages(row: RawRow, name: str, value: object) -> Sequence[Message]:
    if isinstance(value, str):  # tables hold lists as JSON text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise BadInput(f"{row.where}: {name} is neither text nor a list of messages")
    messages = []
    for index, message in enumerate(value):
        role = message.get("role") or SPEAKERS.get(str(message.get("from")))
        if role is None:
            raise BadInput(f"{row.where}: {name}[{index}] does not say whose it is (role, or from)")
        content = message.get("content", message.get("value"))
        messages.append({**{k: v for k, v in message.items() if k not in ("from", "value")}, "role": role})
        messages[-1]["content"] = content
    while messages and messages[-1]["role"] == "assistant":  # the answer that it had
        messages.pop()
    if not messages:
        raise BadInput(f"{row.where}: {name} has no message that waits for an answer")
    return messages
