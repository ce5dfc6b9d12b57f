"""Which samples each step sees, and as which tensors. Step k of a run is a pure function of (samples, seed, k).

So a run can be taken up at any step without replaying the ones before it. With packing several samples share a row;
which ones is decided once, from the seed, and from then on a packed row is what a sample is without packing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from slideformer.data.encode import IGNORED
from slideformer.data.packing import best_fit
from slideformer.data.samples import Sample, lengths_of, token_runs
from slideformer.errors import BadInput

Row = tuple[Sample, ...]  # samples that stand side by side in one row of a micro-batch; one, without packing


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Rows that pass through a unit together. input_ids, labels: int64 [B, S], host; labels are not shifted.

    Rows are padded on the right, where causal attention never looks, so padding needs no attention_mask.
    position_ids: int64 [B, S] where rows hold several samples: they begin anew with each, and with the padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Samples of one dataset, and how often each of them comes up in an epoch. name: for messages."""

    samples: Sequence[Sample]
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one optimizer step sees. epoch: passes over the data when it is done. Token counts are without padding.

    layout: the samples of each row of each micro-batch, as they stand in the tensors.
    """

    micro_batches: tuple[MicroBatch, ...]
    rows: tuple[str, ...]
    epoch: float
    num_input_tokens: int
    num_target_tokens: int
    layout: tuple[tuple[Row, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Batches:
    """The steps of a run. The last step of an epoch takes what is left, so it may be smaller.

    pack_length: tokens that the samples of one row may have together; 0: one sample a row.
    """

    sources: tuple[Source, ...]
    rows_per_micro_batch: int
    micro_batches: int
    seed: int
    pad_id: int
    pack_length: int = 0
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)  # of one epoch

    def __post_init__(self) -> None:
        for source, rows in zip(self.sources, self._rows_of_sources, strict=True):
            if not round(source.weight * len(rows)):
                found = f"{len(rows)} rows" + (" after packing" if self.pack_length else "")
                raise BadInput(
                    f"weight {source.weight:g} of {source.name or 'a dataset'} with {found} leaves no row in an epoch: "
                    "raise it"
                )

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_micro_batch * self.micro_batches

    @cached_property
    def _rows_of_sources(self) -> list[Sequence[Sequence[int]]]:
        """For each source its rows, as indices of samples."""
        if not self.pack_length:
            return [_Alone(len(source.samples)) for source in self.sources]
        return [
            best_fit(lengths_of(source.samples), self.pack_length, shuffled(len(source.samples), self.seed, "pack", s))
            for s, source in enumerate(self.sources)
        ]

    @property
    def rows_per_epoch(self) -> int:
        return sum(round(s.weight * len(rows)) for s, rows in zip(self.sources, self._rows_of_sources, strict=True))

    @property
    def num_packs(self) -> list[int]:
        """For each source its rows after packing."""
        return [len(rows) for rows in self._rows_of_sources]

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows_per_epoch / self.rows_per_step)

    def num_steps(self, *, epochs: float, max_steps: int) -> int:
        """Steps of a run; max_steps decides unless it is -1."""
        return max_steps if max_steps > 0 else math.ceil(epochs * self.steps_per_epoch)

    def warnings(self) -> list[str]:
        """What is allowed but hardly ever meant."""
        if self.rows_per_step <= self.rows_per_epoch:
            return []
        takes = f"{self.rows_per_step} sequences ({self.rows_per_micro_batch} x {self.micro_batches})"
        return [
            f"a step takes {takes}, and there are {self.rows_per_epoch} in an epoch: each step sees all of them once; "
            "lower gradient_accumulation_steps or per_device_train_batch_size for more steps"
        ]

    def step(self, index: int) -> StepBatch:
        """The batch of step `index`, from 0. Rows of like length share a micro-batch; the step's rows are the same."""
        epoch, place = divmod(index, self.steps_per_epoch)
        order = self._order(epoch)
        chosen = order[place * self.rows_per_step : (place + 1) * self.rows_per_step]
        rows = [self._row(int(s), int(r)) for s, r in chosen]
        return step_batch(
            rows,
            self.rows_per_micro_batch,
            self.pad_id,
            packed=bool(self.pack_length),
            epoch=epoch + min((place + 1) * self.rows_per_step / len(order), 1.0),
        )

    def identity(self) -> dict[str, str | int]:
        """Name -> value of all that decides what each step sees; what lies in the files counts, not where they lie."""
        found: dict[str, str | int] = {f"dataset[{i}]": _content(source) for i, source in enumerate(self.sources)}
        found |= {"datasets": len(self.sources), "data_seed": self.seed}
        if self.pack_length:
            found["packing to rows of max_length"] = self.pack_length
        return found

    def _row(self, source: int, row: int) -> Row:
        samples = self.sources[source].samples
        return tuple(samples[i] for i in self._rows_of_sources[source][row])

    def _order(self, epoch: int) -> np.ndarray:
        """[n, 2]: (source, row) in the order of one epoch."""
        if epoch not in self._orders:
            chosen = []
            for s, (source, rows) in enumerate(zip(self.sources, self._rows_of_sources, strict=True)):
                count = len(rows)
                passes, rest = divmod(round(source.weight * count), count)
                picked = np.concatenate([np.tile(np.arange(count), passes), self._rest(s, count, rest, epoch)])
                chosen.append(np.stack([np.full(len(picked), s), picked], axis=1))
            every = np.concatenate(chosen)
            self._orders.clear()
            self._orders[epoch] = every[shuffled(len(every), self.seed, "epoch", epoch)]
        return self._orders[epoch]

    def _rest(self, source: int, count: int, rest: int, epoch: int) -> np.ndarray:
        """`rest` of `count` rows. Epochs take consecutive stretches of one order, so all come up before any returns."""
        order = shuffled(count, self.seed, "rest", source) if rest else np.arange(0)
        return order[(epoch * rest + np.arange(rest)) % count] if rest else order


class _Alone(Sequence[Sequence[int]]):
    """Rows of one sample each."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int]:
        return (index,)


@dataclass(frozen=True, eq=False)
class EvaluationBatches(Sequence[MicroBatch]):
    """All the samples once, longest rows first. Tensors are made when they are asked for. pack_length: as `Batches`."""

    samples: Sequence[Sample]
    rows_per_micro_batch: int
    pad_id: int
    pack_length: int = 0

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self.rows_per_micro_batch)

    def __getitem__(self, index: int) -> MicroBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        chosen = self._rows[index * self.rows_per_micro_batch : (index + 1) * self.rows_per_micro_batch]
        rows = [tuple(self.samples[i] for i in row) for row in chosen]
        return collate(rows, self.pad_id, packed=bool(self.pack_length))

    @cached_property
    def _rows(self) -> list[Sequence[int]]:
        """Indices of samples, by row."""
        lengths = lengths_of(self.samples)
        if not self.pack_length:
            return [(i,) for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])]
        packs = best_fit(lengths, self.pack_length, range(len(lengths)))
        return sorted(packs, key=lambda pack: -sum(lengths[i] for i in pack))


def shuffled(count: int, seed: int, *purpose: object) -> np.ndarray:
    """range(count) in an order that depends on nothing but the arguments: not on a library's version either."""
    prefix = f"{seed}/{'/'.join(map(str, purpose))}/".encode()
    digests = (hashlib.blake2b(prefix + str(i).encode(), digest_size=8).digest() for i in range(count))
    keys = np.fromiter((int.from_bytes(digest) for digest in digests), np.uint64, count)
    return np.argsort(keys, kind="stable")


def step_batch(rows: Sequence[Row], rows_per_micro_batch: int, pad_id: int, *, packed: bool, epoch: float) -> StepBatch:
    """Rows as one step's tensors, longest first."""
    groups = tuple(_by_length(rows, rows_per_micro_batch))
    samples = [sample for row in rows for sample in row]
    return StepBatch(
        micro_batches=tuple(collate(group, pad_id, packed=packed) for group in groups),
        rows=tuple(sample.where for sample in samples),
        epoch=epoch,
        num_input_tokens=sum(map(len, samples)),
        num_target_tokens=sum(sample.num_target_tokens for sample in samples),
        layout=groups,
    )


def _by_length(rows: Sequence[Row], rows_per_micro_batch: int) -> Iterator[tuple[Row, ...]]:
    ordered = sorted(rows, key=_length, reverse=True)
    for start in range(0, len(ordered), rows_per_micro_batch):
        yield tuple(ordered[start : start + rows_per_micro_batch])


def _length(row: Row) -> int:
    return sum(map(len, row))


def collate(rows: Sequence[Row], pad_id: int, *, packed: bool = False) -> MicroBatch:
    """Rows below each other, padded on the right to the longest.

    packed: positions begin anew with every sample, and no sample's first token is a target, since what stands before
    it is another's.
    """
    shape = (len(rows), max(map(_length, rows)))
    input_ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORED)
    position_ids = torch.zeros(shape, dtype=torch.int64) if packed else None
    for index, row in enumerate(rows):
        at = 0
        for sample in row:
            stop = at + len(sample)
            input_ids[index, at:stop] = sample.input_ids
            labels[index, at:stop] = sample.labels
            if position_ids is not None:
                position_ids[index, at:stop] = torch.arange(len(sample))
                labels[index, at] = IGNORED
            at = stop
        if position_ids is not None:
            position_ids[index, at:] = torch.arange(shape[1] - at)
    return MicroBatch(input_ids, labels, position_ids=position_ids)


def _content(source: Source) -> str:
    """What is learned: number, weight and content of the samples in their order."""
    total = hashlib.blake2b(np.array(lengths_of(source.samples), np.int64), digest_size=8)
    learned = hashlib.blake2b(digest_size=8)
    for ids, labels in token_runs(source.samples):
        total.update(ids)
        learned.update(labels)
    total.update(learned.digest())
    return f"{len(source.samples)} samples of weight {source.weight:g} ({total.hexdigest()})"
