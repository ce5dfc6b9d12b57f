"""Which samples each step sees, and as which tensors. Step k of a run is a pure function of (samples, seed, k).

So a run can be taken up at any step without replaying the ones before it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from slideformer.data.encode import IGNORED, Sample
from slideformer.errors import BadInput


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Rows that pass through a unit together. input_ids, labels: int64 [B, S], host; labels are not shifted.

    Rows are padded on the right, where causal attention never looks, so padding needs no attention_mask.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Samples of one file, and how often each of them comes up in an epoch."""

    samples: Sequence[Sample]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one optimizer step sees. epoch: passes over the data when it is done. Token counts are without padding."""

    micro_batches: tuple[MicroBatch, ...]
    rows: tuple[str, ...]
    epoch: float
    num_input_tokens: int
    num_target_tokens: int


@dataclass(frozen=True, eq=False)
class Batches:
    """The steps of a run. The last step of an epoch takes what is left, so it may be smaller."""

    sources: tuple[Source, ...]
    rows_per_micro_batch: int
    micro_batches: int
    seed: int
    pad_id: int
    _orders: dict[int, list[tuple[int, int]]] = field(default_factory=dict, init=False, repr=False)  # of one epoch

    def __post_init__(self) -> None:
        if not self.samples_per_epoch:
            raise BadInput("the weights of the datasets leave no row in an epoch: raise them")

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_micro_batch * self.micro_batches

    @property
    def samples_per_epoch(self) -> int:
        return sum(round(source.weight * len(source.samples)) for source in self.sources)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples_per_epoch / self.rows_per_step)

    def num_steps(self, *, epochs: float, max_steps: int) -> int:
        """Steps of a run; max_steps decides unless it is -1."""
        return max_steps if max_steps > 0 else math.ceil(epochs * self.steps_per_epoch)

    def step(self, index: int) -> StepBatch:
        """The batch of step `index`, from 0. Rows of like length share a micro-batch; the step's rows are the same."""
        epoch, place = divmod(index, self.steps_per_epoch)
        order = self._order(epoch)
        chosen = order[place * self.rows_per_step : (place + 1) * self.rows_per_step]
        samples = [self.sources[s].samples[i] for s, i in chosen]
        return StepBatch(
            micro_batches=tuple(_micro_batches(samples, self.rows_per_micro_batch, self.pad_id)),
            rows=tuple(sample.where for sample in samples),
            epoch=epoch + min((place + 1) * self.rows_per_step / len(order), 1.0),
            num_input_tokens=sum(map(len, samples)),
            num_target_tokens=sum(sample.num_target_tokens for sample in samples),
        )

    def _order(self, epoch: int) -> list[tuple[int, int]]:
        """(source, sample) in the order of one epoch."""
        if epoch not in self._orders:
            chosen: list[tuple[int, int]] = []
            for s, source in enumerate(self.sources):
                count = len(source.samples)
                passes, rest = divmod(round(source.weight * count), count)
                chosen += [(s, i) for i in range(count)] * passes
                chosen += _rest_of_epoch(s, count, rest, self.seed, epoch)
            self._orders.clear()
            self._orders[epoch] = [chosen[i] for i in shuffled(len(chosen), self.seed, "epoch", epoch)]
        return self._orders[epoch]


def evaluation_batches(samples: Sequence[Sample], rows_per_micro_batch: int, pad_id: int) -> list[MicroBatch]:
    """All the samples once, longest first."""
    return list(_micro_batches(samples, rows_per_micro_batch, pad_id))


def shuffled(count: int, seed: int, *purpose: object) -> list[int]:
    """range(count) in an order that depends on nothing but the arguments: not on a library's version either."""
    prefix = f"{seed}/{'/'.join(map(str, purpose))}/".encode()
    return sorted(range(count), key=lambda i: hashlib.blake2b(prefix + str(i).encode(), digest_size=8).digest())


def _rest_of_epoch(source: int, count: int, rest: int, seed: int, epoch: int) -> list[tuple[int, int]]:
    """`rest` of `count` samples. Epochs take consecutive stretches of one order, so all come up before any returns."""
    order = shuffled(count, seed, "rest", source) if rest else []
    return [(source, order[(epoch * rest + i) % count]) for i in range(rest)]


def _micro_batches(samples: Sequence[Sample], rows: int, pad_id: int) -> Iterator[MicroBatch]:
    by_length = sorted(samples, key=len, reverse=True)
    for start in range(0, len(by_length), rows):
        yield collate(by_length[start : start + rows], pad_id)


def collate(samples: Sequence[Sample], pad_id: int) -> MicroBatch:
    """Samples side by side, padded on the right to the longest."""
    shape = (len(samples), max(map(len, samples)))
    input_ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORED)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample)] = sample.input_ids
        labels[row, : len(sample)] = sample.labels
    return MicroBatch(input_ids, labels)
