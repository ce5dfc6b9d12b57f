"""The rows of a run as the model sees them: read back from the very tensors that the trainer passes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice

import torch

from slideformer.data.batches import Batches, MicroBatch, Row
from slideformer.data.encode import IGNORED
from slideformer.data.stream import StreamedBatches
from slideformer.data.tokenizer import Codec


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that are all trained, or none of them. text: as the tokenizer decodes them there."""

    text: str
    trained: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SeenSample:
    """One sample of a row. where: its row in the data. notes: what is unusual about it."""

    where: str
    segments: tuple[Segment, ...]
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_trained(self) -> int:
        return sum(segment.num_tokens for segment in self.segments if segment.trained)


@dataclass(frozen=True, slots=True)
class SeenRow:
    """One row of a micro-batch. step, micro_batch, row: from 1. The lists are the row's tensors, padding included."""

    step: int
    micro_batch: int
    row: int
    samples: tuple[SeenSample, ...]
    num_padding: int
    input_ids: list[int]
    labels: list[int]
    position_ids: list[int] | None

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return len(self.input_ids) - self.num_padding

    @property
    def num_trained(self) -> int:
        return sum(sample.num_trained for sample in self.samples)

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            **{name: getattr(self, name) for name in ("step", "micro_batch", "row", "num_tokens", "num_trained")},
            "num_padding": self.num_padding,
            "samples": [
                {**asdict(sample), "num_tokens": sample.num_tokens, "num_trained": sample.num_trained}
                for sample in self.samples
            ],
            **{name: getattr(self, name) for name in ("input_ids", "labels", "position_ids")},
        }


def seen_rows(
    batches: Batches | StreamedBatches, codec: Codec, *, num_rows: int, first_step: int = 1, num_steps: int
) -> list[SeenRow]:
    """The first rows from step `first_step` on, both from 1. num_steps: of the run, after which there are no more."""
    return list(islice(_every_row(batches, codec, range(first_step, num_steps + 1)), num_rows))


def _every_row(batches: Batches | StreamedBatches, codec: Codec, steps: range) -> Iterator[SeenRow]:
    for step in steps:
        batch = batches.step(step - 1)
        for m, (micro_batch, rows) in enumerate(zip(batch.micro_batches, batch.layout, strict=True), start=1):
            for r, samples in enumerate(rows):
                yield _seen(micro_batch, r, samples, codec, place=(step, m, r + 1))


def _seen(micro_batch: MicroBatch, row: int, samples: Row, codec: Codec, *, place: tuple[int, int, int]) -> SeenRow:
    ids, labels = micro_batch.input_ids[row], micro_batch.labels[row]
    trained = labels != IGNORED
    trained[0] = False  # there is nothing before it to be predicted from
    found, at = [], 0
    for sample in samples:
        stop = at + len(sample)
        segments = tuple(_segments(ids[at:stop].tolist(), trained[at:stop].tolist(), codec))
        found.append(SeenSample(sample.where, segments, tuple(sample.notes())))
        at = stop
    assert not bool(trained[at:].any())
    return SeenRow(
        *place,
        samples=tuple(found),
        num_padding=len(ids) - at,
        input_ids=ids.tolist(),
        labels=labels.tolist(),
        position_ids=_row_of(micro_batch.position_ids, row),
    )


def _segments(ids: Sequence[int], trained: Sequence[bool], codec: Codec) -> Iterator[Segment]:
    """Each is decoded behind what stands before it: a tokenizer may decode a word's first piece without its space."""
    start = 0
    for is_trained, group in groupby(trained):
        stop = start + len(list(group))
        text = codec.decode(ids[:stop])[len(codec.decode(ids[:start])) :]
        yield Segment(text, is_trained, stop - start)
        start = stop


def _row_of(tensor: torch.Tensor | None, row: int) -> list[int] | None:
    return None if tensor is None else tensor[row].tolist()
