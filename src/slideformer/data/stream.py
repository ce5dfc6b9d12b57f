"""The steps of a run whose rows are read as they are needed: of files too large to be gone through first.

Step k is a function of the files, the seed and k, as everywhere; but to get to it, all rows before it are read and
encoded again. Samples are drawn from the datasets by their weights, gathered in a buffer, shuffled there, and packed
there; a dataset that ends begins anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from slideformer.data.batches import Row, Source, StepBatch, shuffled, step_batch
from slideformer.data.packing import best_fit
from slideformer.data.report import FileReport
from slideformer.data.samples import Sample
from slideformer.data.sources import RowSource
from slideformer.data.workers import Encoder, encode_all
from slideformer.errors import BadInput

READ_ROWS = 64  # of a dataset, at a time


@dataclass(frozen=True, slots=True)
class Stream:
    """One dataset that is read as it goes. report: counts its first pass."""

    source: RowSource
    encoder: Encoder
    weight: float
    report: FileReport

    def identity(self) -> str:
        """Which files, and how they are encoded; not what is in them."""
        facts = {"encoder": self.encoder.identity(), "source": self.source.outline(), "weight": self.weight}
        text = json.dumps(facts, sort_keys=True, default=str)
        return f"a stream of weight {self.weight:g} ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"

    def samples(self) -> Iterator[Sample]:
        """Without end. Raises BadInput for a dataset of which no row can be used."""
        first = True
        while True:
            found = False
            for sample in self._once(counted=first):
                found = True
                yield sample
            if not found:
                raise BadInput(self.report.nothing_usable())
            first = False

    def _once(self, *, counted: bool) -> Iterator[Sample]:
        if counted:
            self.report.clear()
        for chunk in encode_all(self.source.rows(), self.encoder, chunk_rows=READ_ROWS):
            if counted:
                self.report.add(chunk)
            for sample, (name, number) in zip(chunk.samples, chunk.places, strict=True):
                ids, labels = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)
                yield Sample(ids, labels, f"{name}:{number}", sample.remarks)


@dataclass(eq=False)
class StreamedBatches:
    """Has what `Batches` has, as far as it can be known. max_steps: of the run, which is one epoch."""

    streams: tuple[Stream, ...]
    rows_per_micro_batch: int
    micro_batches: int
    seed: int
    pad_id: int
    buffer_size: int
    max_steps: int
    pack_length: int = 0
    sources: tuple[Source, ...] = ()
    _rows: Iterator[Row] = field(init=False, repr=False)
    _next: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._rows = self._in_order()

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_micro_batch * self.micro_batches

    @property
    def steps_per_epoch(self) -> int:
        return self.max_steps

    def num_steps(self, *, epochs: float, max_steps: int) -> int:
        return max_steps

    def warnings(self) -> list[str]:
        return []

    def step(self, index: int) -> StepBatch:
        """The batch of step `index`, from 0. One that is not the next after the last reads everything before it."""
        if index < self._next:
            self._rows, self._next = self._in_order(), 0
        for _ in range((index - self._next) * self.rows_per_step):
            next(self._rows)
        rows = [next(self._rows) for _ in range(self.rows_per_step)]
        self._next = index + 1
        return step_batch(
            rows,
            self.rows_per_micro_batch,
            self.pad_id,
            packed=bool(self.pack_length),
            epoch=self._next / self.max_steps,
        )

    def identity(self) -> dict[str, str | int]:
        """Name -> value of what decides what each step sees: files and encoding, not content."""
        return {
            **{f"dataset[{i}]": stream.identity() for i, stream in enumerate(self.streams)},
            "datasets": len(self.streams),
            "data_seed": self.seed,
            "shuffle_buffer_size": self.buffer_size,
            "packing to rows of max_length": self.pack_length,
        }

    def _in_order(self) -> Iterator[Row]:
        drawn = self._drawn()
        buffers = 0
        while True:
            samples = [next(drawn) for _ in range(self.buffer_size)]
            order = shuffled(len(samples), self.seed, "buffer", buffers)
            if self.pack_length:
                packs = best_fit([len(sample) for sample in samples], self.pack_length, order)
                shuffled_packs = shuffled(len(packs), self.seed, "packs", buffers)
                yield from (tuple(samples[i] for i in packs[p]) for p in shuffled_packs)
            else:
                yield from ((samples[i],) for i in order)
            buffers += 1

    def _drawn(self) -> Iterator[Sample]:
        """Samples of the streams, in the shares of their weights, each in its own order."""
        streams = [stream.samples() for stream in self.streams]
        weights = [stream.weight for stream in self.streams]
        drawn = 0
        while True:
            yield next(streams[_pick(weights, self.seed, drawn)])
            drawn += 1


def _pick(weights: Sequence[float], seed: int, index: int) -> int:
    """An index with the probability of its weight, from the seed and a counter alone."""
    digest = hashlib.blake2b(f"{seed}/stream/{index}".encode(), digest_size=8).digest()
    at = int.from_bytes(digest) / 2**64 * sum(weights)
    for place, weight in enumerate(weights[:-1]):
        if at < weight:
            return place
        at -= weight
    return len(weights) - 1
