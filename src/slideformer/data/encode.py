"""One row of a file as samples: token ids, labels, and what had to be done to make them fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from slideformer.config import TrainConfig
from slideformer.data.chat import common_prefix, encode_chat, encode_whole_chat
from slideformer.data.formats import RowFormat, parse_row
from slideformer.data.rows import (
    Block,
    Chat,
    Completion,
    Content,
    Instruction,
    RawRow,
    Reason,
    Text,
    Tokens,
    UnusableRow,
)
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput

IGNORED = -100  # the label of a token that is not learned, as in torch's cross entropy


class Remark(IntFlag):
    """What is unusual about a sample that is used all the same."""

    NONE = 0
    TRUNCATED = 1
    UNTERMINATED = 2
    UNMASKED = 4
    DATED = 8


REMARKS: Mapping[Remark, str] = {
    Remark.TRUNCATED: "cut to max_length",
    Remark.UNTERMINATED: "an answer without an end token, so the model does not learn to stop",
    Remark.UNMASKED: "no token left out of the loss, not even the prompt's",
    Remark.DATED: "today's date is in it, by the chat template, so rows differ from day to day and a run cannot be "
    'continued tomorrow; fix it with chat_template_kwargs: {date_string: "26 Jul 2024"}',
}
"""In the words of the report."""


@dataclass(frozen=True, slots=True)
class EncodingRules:
    """All settings that change what a row becomes. Named as in the config."""

    max_length: int
    excess_length_strategy: str
    assistant_only_loss: bool
    completion_only_loss: bool

    @classmethod
    def of(cls, config: TrainConfig) -> EncodingRules:
        return cls(
            config.max_length,
            config.excess_length_strategy,
            config.assistant_only_loss,
            config.completion_only_loss,
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence. input_ids, labels: int32 [n], labels not shifted. num_cut: tokens that max_length took away."""

    input_ids: np.ndarray
    labels: np.ndarray
    remarks: Remark = Remark.NONE
    num_cut: int = 0

    @property
    def num_target_tokens(self) -> int:
        """Learned tokens. The first token of a sequence has nothing before it to be predicted from."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))


def encode_row(row: RawRow, row_format: RowFormat, codec: Codec, rules: EncodingRules) -> Iterator[Encoded]:
    """The samples of a row: one, or the consecutive pieces of a stretch of plain text.

    Raises UnusableRow (see `rows.Reason`), BadInput as `parse_row` and `encode_chat` do, and BadInput for a row
    over max_length with excess_length_strategy: raise.
    """
    content = parse_row(row, row_format)
    if isinstance(content, Block):
        yield from _pieces(content, codec, rules)
        return
    try:
        ids, labels = _ids_and_labels(content, codec, rules, row.where)
    except TypeError:
        if _has_half_characters(row):
            raise UnusableRow(Reason.NOT_TEXT, "it has half a character (a surrogate without its pair)") from None
        raise
    remarks = Remark.NONE if isinstance(content, Text | Tokens) else _remarks(ids, labels, codec, rules)
    if codec.is_dated and isinstance(content, Chat | Instruction):
        remarks |= Remark.DATED
    yield _fit(ids, labels, row, rules, remarks)


def _has_half_characters(row: RawRow) -> bool:
    r"""JSON may hold "\ud83d" alone, which is no text that a tokenizer takes."""
    try:
        json.dumps(row.columns, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _ids_and_labels(content: Content, codec: Codec, rules: EncodingRules, where: str) -> tuple[np.ndarray, np.ndarray]:
    match content:
        case Instruction(chat, plain):
            return _ids_and_labels(chat if codec.has_template else plain, codec, rules, where)
        case Tokens(input_ids, labels):
            return np.array(input_ids, np.int32), np.array(labels, np.int32)
        case Text(text):
            ids = np.array(_with_end(codec.encode(text), codec), np.int32)
            return ids, ids
        case Completion():
            ids, start = _encode_completion(content, codec, rules)
            labels = np.array(ids, np.int32)
            labels[:start] = IGNORED
            return np.array(ids, np.int32), labels
        case Chat():
            answers = rules.assistant_only_loss and (rules.completion_only_loss or not content.has_prompt)
            encode = encode_chat if answers else encode_whole_chat
            rendered = encode(content, codec, where)
            ids = np.array(rendered.ids, np.int32)
            return ids, np.where(np.array(rendered.learned, bool), ids, np.int32(IGNORED))
    raise AssertionError(content)


def _pieces(block: Block, codec: Codec, rules: EncodingRules) -> Iterator[Encoded]:
    ids = codec.encode(block.text) if block.starts else codec.encode_bare(block.text)
    if block.ends:
        ids = _with_end(ids, codec)
    elif block.starts:
        ids = ids[: len(ids) - codec.num_added_behind]
    flat = np.array(ids, np.int32)
    for start in range(0, len(flat), rules.max_length):
        piece = flat[start : start + rules.max_length]
        if len(piece) > 1:  # a last piece of one token has nothing to predict
            yield Encoded(piece, piece)


def _encode_completion(row: Completion, codec: Codec, rules: EncodingRules) -> tuple[list[int], int]:
    """Ids, and where the completion begins: where the ids of the whole first differ from those of the prompt alone, as
    at generation."""
    ids = _with_end(codec.encode(row.prompt + row.completion), codec)
    return ids, common_prefix(ids, codec.encode(row.prompt)) if rules.completion_only_loss else 0


def _with_end(ids: list[int], codec: Codec) -> list[int]:
    """Ids that end with the end token, once."""
    if not codec.end_ids or (ids and ids[-1] == codec.end_ids[0]):
        return ids
    return [*ids, codec.end_ids[0]]


def _remarks(ids: np.ndarray, labels: np.ndarray, codec: Codec, rules: EncodingRules) -> Remark:
    """What is unusual about a row of prompts and answers."""
    remarks = Remark.NONE
    learned = labels != IGNORED
    lasts = ids[learned & ~np.append(learned[1:], False)]
    if not all(token in codec.end_ids for token in lasts.tolist()):
        remarks |= Remark.UNTERMINATED
    if learned.all() and rules.assistant_only_loss and rules.completion_only_loss:
        remarks |= Remark.UNMASKED
    return remarks


def _fit(ids: np.ndarray, labels: np.ndarray, row: RawRow, rules: EncodingRules, remarks: Remark) -> Encoded:
    num_cut = max(len(ids) - rules.max_length, 0)
    if num_cut and rules.excess_length_strategy != "truncate":
        found = f"{len(ids)} tokens, max_length is {rules.max_length}"
        if rules.excess_length_strategy == "raise":
            raise BadInput(
                f"{row.where}: {Reason.TOO_LONG}: {found}: raise max_length, or set excess_length_strategy to "
                "truncate or drop"
            )
        raise UnusableRow(Reason.TOO_LONG, found)
    encoded = Encoded(
        ids[: rules.max_length],
        labels[: rules.max_length],
        remarks | Remark.TRUNCATED if num_cut else remarks,
        num_cut,
    )
    if not encoded.num_target_tokens:
        cut = f" after cutting to max_length {rules.max_length}" if num_cut else ""
        raise UnusableRow(Reason.NO_TARGET, f"none of its {len(encoded.input_ids)} tokens is to be learned{cut}")
    return encoded


def describe(remarks: Remark) -> Sequence[str]:
    """In the words of the report."""
    return [text for remark, text in REMARKS.items() if remark in remarks]
