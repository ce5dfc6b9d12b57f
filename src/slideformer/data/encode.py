"""One row of a file as samples: token ids, labels, and what had to be done to make them fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from slideformer.config import TrainConfig
from slideformer.data.chat import common_prefix, encode_chat, encode_whole_chat
from slideformer.data.formats import Chat, Completion, RawRow, Reason, Text, UnusableRow, parse_row
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput


class Remark(StrEnum):
    """What is unusual about a sample that is used all the same, in the words of the report."""

    TRUNCATED = "cut to max_length"
    UNTERMINATED = "an answer without an end token, so the model does not learn to stop"
    UNMASKED = "no token left out of the loss, not even the prompt's"


IGNORED = -100  # the label of a token that is not learned, as in torch's cross entropy


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence. input_ids, labels: int32 [n], labels not shifted. where: the row it comes from."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    where: str
    remarks: frozenset[Remark] = frozenset()

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_target_tokens(self) -> int:
        """Learned tokens. The first token of a sequence has nothing before it to be predicted from."""
        return int((self.labels[1:] != IGNORED).sum())


def encode_row(row: RawRow, codec: Codec, config: TrainConfig) -> Iterator[Sample]:
    """The samples of a row: one, or the consecutive pieces of a document.

    Raises UnusableRow (see `formats.Reason`), BadInput as `parse_row` and `encode_chat` do, and BadInput for a row
    over max_length with excess_length_strategy: raise.
    """
    content = parse_row(row, text_field=config.dataset_text_field)
    match content:
        case Text(text, document=True):
            ids = _with_end(codec.encode(text), codec)
            for start in range(0, len(ids), config.max_length):
                piece = ids[start : start + config.max_length]
                if len(piece) > 1:  # a last piece of one token has nothing to predict
                    yield _sample(piece, [True] * len(piece), row.where, frozenset())
            return
        case Text(text):
            ids = _with_end(codec.encode(text), codec)
            learned = [True] * len(ids)
        case Completion():
            ids, learned = _encode_completion(content, codec, config)
        case Chat():
            encode = encode_chat if config.assistant_only_loss else encode_whole_chat
            rendered = encode(content, codec, row.where)
            ids, learned = rendered.ids, rendered.learned
    remarks = set() if isinstance(content, Text) else _remarks(ids, learned, codec, config)
    yield _fit(ids, learned, row, config, remarks)


def _encode_completion(row: Completion, codec: Codec, config: TrainConfig) -> tuple[list[int], list[bool]]:
    """The boundary is where the ids of the whole first differ from those of the prompt alone, as at generation."""
    ids = _with_end(codec.encode(row.prompt + row.completion), codec)
    start = common_prefix(ids, codec.encode(row.prompt)) if config.completion_only_loss else 0
    return ids, [i >= start for i in range(len(ids))]


def _with_end(ids: list[int], codec: Codec) -> list[int]:
    """Ids that end with the end token, once."""
    if not codec.end_ids or (ids and ids[-1] == codec.end_ids[0]):
        return ids
    return [*ids, codec.end_ids[0]]


def _remarks(ids: Sequence[int], learned: Sequence[bool], codec: Codec, config: TrainConfig) -> set[Remark]:
    """What is unusual about a row of prompts and answers."""
    remarks = set()
    following = [*learned[1:], False]
    lasts = [i for i, here, after in zip(ids, learned, following, strict=True) if here and not after]
    if not all(token in codec.end_ids for token in lasts):
        remarks.add(Remark.UNTERMINATED)
    if all(learned) and config.assistant_only_loss and config.completion_only_loss:
        remarks.add(Remark.UNMASKED)
    return remarks


def _fit(ids: list[int], learned: list[bool], row: RawRow, config: TrainConfig, remarks: set[Remark]) -> Sample:
    over = len(ids) > config.max_length
    if over and config.excess_length_strategy != "truncate":
        found = f"{len(ids)} tokens, max_length is {config.max_length}"
        if config.excess_length_strategy == "raise":
            raise BadInput(
                f"{row.where}: {Reason.TOO_LONG}: {found}: raise max_length, or set excess_length_strategy to "
                "truncate or drop"
            )
        raise UnusableRow(Reason.TOO_LONG, found)
    ids, learned = ids[: config.max_length], learned[: config.max_length]
    if not any(learned[1:]):
        cut = f" after cutting to max_length {config.max_length}" if over else ""
        raise UnusableRow(Reason.NO_TARGET, f"none of its {len(ids)} tokens is to be learned{cut}")
    return _sample(ids, learned, row.where, frozenset(remarks | {Remark.TRUNCATED} if over else remarks))


def _sample(ids: Sequence[int], learned: Sequence[bool], where: str, remarks: frozenset[Remark]) -> Sample:
    input_ids = torch.tensor(ids, dtype=torch.int32)
    labels = torch.where(torch.tensor(learned), input_ids, IGNORED)
    return Sample(input_ids, labels, where, remarks)
