"""Conversations as token ids, with a mask of the tokens that are the assistant's.

The tokenizer's own chat template says what a conversation looks like. Which part of it is the assistant's comes from
the template's {% generation %} markers, or, where it has none, from rendering the conversation message by message and
comparing. What cannot be derived for certain is an error, never a guess.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from slideformer.data.rows import Chat, Message, Reason, UnusableRow
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput

NOWHERE = (sys.maxsize, sys.maxsize)  # behind every text
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
    return Rendered(encoded["input_ids"], _touching(encoded["offset_mapping"], spans))


def _touching(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each token whether any of its characters is in a span. Both are in the order of the text."""
    learned, waiting = [], iter(spans)
    first, last = next(waiting, NOWHERE)
    for start, stop in offsets:
        while start >= last and (first, last) != NOWHERE:
            first, last = next(waiting, NOWHERE)
        learned.append(stop > first and start < last)
    return learned


def _answer_span(index: int, text: str, chat: Chat, codec: Codec, where: str) -> tuple[int, int]:
    """Where in the rendered conversation message `index` stands, from its first character to its end token's last."""
    try:
        before = _before_answer(index, chat, codec)
        is_last = index + 1 == len(chat.messages)
        upto = text if is_last else _render(codec, chat.messages[: index + 1], chat)
    except UnusableRow as error:
        raise _underivable(codec, where, index, f"it refuses the conversation up to there ({error})") from None
    if text.startswith(before) and text.startswith(upto) and len(upto) > len(before):
        return len(before), len(before) + _end_of_answer(text[len(before) : len(upto)], codec)
    # Some templates render an answer differently once another message follows (Qwen3 drops its thoughts).
    head, rest = _around_a_stand_in(index, chat, codec) or (None, None)
    if text.startswith(before):
        start = len(before)
    elif head is not None and text.startswith(head) and before.startswith(head):
        start = len(head)  # the generation prompt goes on with what earlier answers lose, as an empty thought
    else:
        raise _underivable(codec, where, index, "its generation prompt is not how the message begins")
    if rest is not None and text.endswith(rest) and len(text) - len(rest) >= start:
        end_token = re.match(r"\s*(?:" + "|".join(map(re.escape, codec.special_tokens)) + ")", rest)
        if codec.special_tokens and end_token:
            return start, len(text) - len(rest) + end_token.end()
    raise _underivable(codec, where, index, "the message is rendered differently when more messages follow")


def _before_answer(index: int, chat: Chat, codec: Codec) -> str:
    """The conversation up to answer `index` with its generation prompt. No template takes a conversation of nothing:
    what then stands before the first message is what stands before any other words in its place."""
    if index:
        return _render(codec, chat.messages[:index], chat, add_generation_prompt=True)
    around = _around_a_stand_in(index, chat, codec)
    if around is None:
        raise UnusableRow(Reason.TEMPLATE, "it begins with the assistant")
    return around[0]


def _around_a_stand_in(index: int, chat: Chat, codec: Codec) -> tuple[str, str] | None:
    """What stands before and after other words in the place of answer `index`, if the template keeps those."""
    changed = [*chat.messages[:index], {"role": "assistant", "content": STAND_IN}, *chat.messages[index + 1 :]]
    try:
        head, found, rest = _render(codec, changed, chat).rpartition(STAND_IN)
    except UnusableRow:
        return None
    return (head, rest) if found else None


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
