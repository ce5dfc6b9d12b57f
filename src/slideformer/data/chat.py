"""Conversations as token ids, with a mask of the tokens that are the assistant's.

The tokenizer's own chat template says what a conversation looks like. Which part of it is the assistant's comes from
the template's {% generation %} markers, or, where it has none, from rendering the conversation message by message and
comparing. What cannot be derived for certain is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from slideformer.data.rows import Chat, Message, Reason, UnusableRow
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput

STAND_IN = "stand-in-for-an-answer"  # small letters, no white space: templates leave it as it is
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """ids of a conversation, and for each whether it is to be learned."""

    ids: list[int]
    learned: list[bool]


def encode_chat(chat: Chat, codec: Codec, where: str) -> Rendered:
    """Ids of a conversation; learned are the assistant's messages from `answers_from` on, with their end tokens.

    where: the row, for messages. Raises BadInput: no chat template, or a mask that cannot be derived from it.
    Raises UnusableRow: the template itself refuses the conversation.
    """
    _require_template(codec, where)
    template = codec.tokenizer.get_chat_template(tools=chat.tools)
    return _by_markers(chat, codec) if GENERATION_MARKER.search(template) else _by_rendering(chat, codec, where)


def encode_whole_chat(chat: Chat, codec: Codec, where: str) -> Rendered:
    """Ids of a conversation of which every token is to be learned. Raises as `encode_chat` does."""
    _require_template(codec, where)
    ids = codec.encode_bare(_render(codec, chat.messages, chat))
    return Rendered(ids, [True] * len(ids))


def _require_template(codec: Codec, where: str) -> None:
    if not codec.has_template:
        raise BadInput(
            f"{where} is a conversation, but the tokenizer of {codec.name} has no chat template: "
            "put a chat_template.jinja into that folder, or give text or prompt and completion rows"
        )


def _by_markers(chat: Chat, codec: Codec) -> Rendered:
    encoded = _apply(codec, chat.messages, chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, learned = encoded["input_ids"], [bool(m) for m in encoded["assistant_masks"]]
    if chat.answers_from:
        prompt = _render(codec, chat.messages[: chat.answers_from], chat, add_generation_prompt=True)
        start = common_prefix(ids, codec.encode_bare(prompt))
        learned = [m and i >= start for i, m in enumerate(learned)]
    return Rendered(ids, learned)


def _by_rendering(chat: Chat, codec: Codec, where: str) -> Rendered:
    text = _render(codec, chat.messages, chat)
    spans = [
        _answer_span(index, text, chat, codec, where)
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.answers_from
    ]
    encoded = codec.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [any(stop > first and start < last for first, last in spans) for start, stop in encoded["offset_mapping"]]
    return Rendered(encoded["input_ids"], learned)


def _answer_span(index: int, text: str, chat: Chat, codec: Codec, where: str) -> tuple[int, int]:
    """Where in the rendered conversation message `index` stands, from its first character to its end token's last."""
    try:
        before = _render(codec, chat.messages[:index], chat, add_generation_prompt=True)
        upto = _render(codec, chat.messages[: index + 1], chat)
    except UnusableRow as error:
        raise _underivable(codec, where, index, f"it refuses the conversation up to there ({error})") from None
    if not text.startswith(before):
        raise _underivable(codec, where, index, "its generation prompt is not how the message begins")
    start = len(before)
    if text.startswith(upto) and len(upto) > start:
        return start, start + _end_of_answer(text[start : len(upto)], codec)
    # Some templates render an answer differently once another message follows (Qwen3 drops its thoughts).
    stop = _stop_beside_a_stand_in(index, text, before, chat, codec)
    if stop is not None:
        return start, stop
    raise _underivable(codec, where, index, "the message is rendered differently when more messages follow")


def _stop_beside_a_stand_in(index: int, text: str, before: str, chat: Chat, codec: Codec) -> int | None:
    """Where answer `index` ends, by what follows it in the same conversation with other words in its place.

    None if that does not tell: the rest is rendered differently too, or no end token follows.
    """
    changed = [*chat.messages[:index], {"role": "assistant", "content": STAND_IN}, *chat.messages[index + 1 :]]
    try:
        other = _render(codec, changed, chat)
    except UnusableRow:
        return None
    _, found, rest = other.rpartition(STAND_IN)
    stop = len(text) - len(rest)
    if not found or not text.endswith(rest) or stop < len(before):
        return None
    end_token = re.match(r"\s*(?:" + "|".join(map(re.escape, codec.special_tokens)) + ")", rest)
    return stop + end_token.end() if codec.special_tokens and end_token else None


def _end_of_answer(answer: str, codec: Codec) -> int:
    """Length of an answer without the white space that a template puts after the end token."""
    kept = answer.rstrip()
    return len(kept) if kept.endswith(codec.special_tokens) else len(answer)


def _underivable(codec: Codec, where: str, index: int, why: str) -> BadInput:
    return BadInput(
        f"{where}: which tokens are the assistant's cannot be derived from the chat template of {codec.name} for "
        f"messages[{index}]: {why}; add {{% generation %}} markers to the template, or set assistant_only_loss: false"
    )


def _render(codec: Codec, messages: Sequence[Message], chat: Chat, *, add_generation_prompt: bool = False) -> str:
    return _apply(codec, messages, chat, tokenize=False, add_generation_prompt=add_generation_prompt)


def _apply(codec: Codec, messages: Sequence[Message], chat: Chat, **options: bool):
    try:
        return codec.tokenizer.apply_chat_template(list(messages), tools=chat.tools, **codec.template_kwargs, **options)
    except (TemplateError, TypeError, KeyError, IndexError) as error:
        raise UnusableRow(Reason.TEMPLATE, str(error)) from None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences share at their start."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
