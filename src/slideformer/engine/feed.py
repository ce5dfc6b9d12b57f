"""One batch as the plan consumes it: one flat int64 tensor that crosses to the device in one copy.

Rows: the table's rows that the batch touches, sorted; token ids are remapped into them. Targets: the positions that
predict something (labels are shifted here, as the models themselves do), so the head works on those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slideformer.data.batches import MicroBatch
from slideformer.errors import BadInput
from slideformer.layout import Layout
from slideformer.memory import BatchShape
from slideformer.model.packed_attention import Packing, packing_of

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Slice:
    start: int
    shape: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        numel = 1
        for size in self.shape:
            numel *= size
        return flat[self.start : self.start + numel].view(self.shape)


@dataclass(frozen=True, slots=True)
class MicroFeed:
    """Where one micro-batch's parts lie in the flat tensor. ids [B, S]: into the rows. targets, labels [n]: position
    in the flattened micro-batch, and the token it predicts. packing: where samples begin, if several share a row."""

    ids: Slice
    targets: Slice
    labels: Slice
    attention_mask: Slice | None
    position_ids: Slice | None
    packing: Packing | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.shape[0], self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class Feed:
    """flat: int64, host. rows: int64 [n], sorted, host (also part of flat at `row_slice`).

    rows_by_tile: per tile of the table, the touched rows counted from the tile's first, and where they lie in `rows`.
    """

    flat: torch.Tensor
    micro: tuple[MicroFeed, ...]
    rows: torch.Tensor
    row_slice: Slice
    rows_by_tile: tuple[tuple[torch.Tensor, int, int], ...]
    padding_row: int | None
    num_target_tokens: int
    num_tokens: int


def build_feed(
    batch: Sequence[MicroBatch],
    shape: BatchShape,
    layout: Layout,
    padding_idx: int | None,
    stage: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
    *,
    num_positions: int | None = None,
) -> Feed:
    """Check a batch against the sizes the engine was built for, and lay it out. stage: makes the flat
    tensor fit for an asynchronous copy. num_positions: rows of a learned position table. Raises BadInput."""
    if not 1 <= len(batch) <= shape.micro_batches:
        raise BadInput(f"the batch has {len(batch)} micro-batches, the engine was built for 1 to {shape.micro_batches}")
    for i, micro in enumerate(batch):
        _check(i, micro, shape, layout.units[0].params[0].shape[0])
        _check_positions(i, micro, num_positions)
    rows, remapped = torch.unique(torch.cat([m.input_ids.reshape(-1) for m in batch]), return_inverse=True)
    flat = Flat()
    feeds = tuple(
        _lay_out(micro, ids, flat)
        for micro, ids in zip(batch, remapped.split([m.input_ids.numel() for m in batch]), strict=True)
    )
    row_slice = flat.put(rows)
    padding = None if padding_idx is None else (rows == padding_idx).nonzero().flatten().tolist()
    return Feed(
        flat=stage(torch.cat(flat.parts)),
        micro=feeds,
        rows=rows,
        row_slice=row_slice,
        rows_by_tile=by_tile(rows, layout),
        padding_row=padding[0] if padding else None,
        num_target_tokens=sum(feed.targets.shape[0] for feed in feeds),
        num_tokens=sum(m.input_ids.numel() if m.attention_mask is None else int(m.attention_mask.sum()) for m in batch),
    )


def in_parts(batch: Sequence[MicroBatch], rows: int) -> list[MicroBatch]:
    """The same rows in micro-batches of at most so many."""

    def part(micro: MicroBatch, start: int) -> MicroBatch:
        columns = (micro.input_ids, micro.labels, micro.attention_mask, micro.position_ids)
        return MicroBatch(*(None if column is None else column[start : start + rows] for column in columns))

    return [part(micro, start) for micro in batch for start in range(0, micro.input_ids.shape[0], rows)]


class Flat:
    """Collects tensors that will lie one behind the other."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self._used = 0

    def put(self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> Slice:
        self.parts.append(tensor.reshape(-1).to(torch.int64))
        place = Slice(self._used, shape or (tensor.numel(),))
        self._used += tensor.numel()
        return place


def _lay_out(micro: MicroBatch, ids: torch.Tensor, flat: Flat) -> MicroFeed:
    """ids: the micro-batch's, remapped into the rows, flattened."""
    shape = tuple(micro.input_ids.shape)
    shifted = torch.full(shape, IGNORE, dtype=torch.int64)
    shifted[:, :-1] = micro.labels[:, 1:]
    targets = (shifted.reshape(-1) != IGNORE).nonzero().squeeze(1)
    mask, positions = micro.attention_mask, micro.position_ids
    if mask is not None and _right_padded(mask):
        mask = None  # no causal query sees what lies to its right
    return MicroFeed(
        ids=flat.put(ids, shape),
        targets=flat.put(targets),
        labels=flat.put(shifted.reshape(-1)[targets]),
        attention_mask=None if mask is None else flat.put(mask, shape),
        position_ids=None if positions is None else flat.put(positions, shape),
        packing=None if positions is None else packing_of(positions),
    )


def by_tile(rows: torch.Tensor, layout: Layout) -> tuple[tuple[torch.Tensor, int, int], ...]:
    width, tiles = layout.units[0].row_numel, layout.tiles(0)
    starts = [t.start // width for t in tiles]
    cuts = [*torch.searchsorted(rows, torch.tensor(starts)).tolist(), rows.numel()]
    return tuple((rows[a:b] - first, a, b) for a, b, first in zip(cuts[:-1], cuts[1:], starts, strict=True))


def _right_padded(mask: torch.Tensor) -> bool:
    return mask.dim() == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all()) and bool((mask[:, :1] > 0).all())


def _check(index: int, micro: MicroBatch, shape: BatchShape, vocab_size: int) -> None:
    name = f"micro-batch {index}"
    ids, labels = micro.input_ids, micro.labels
    if ids.dim() != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise BadInput(f"{name}: input_ids must be int64 [rows, length], found {ids.dtype} {list(ids.shape)}")
    for other, tensor in (
        ("labels", labels),
        ("attention_mask", micro.attention_mask),
        ("position_ids", micro.position_ids),
    ):
        if tensor is not None and tensor.shape != ids.shape:
            raise BadInput(
                f"{name}: {other} is {list(tensor.shape)}, input_ids is {list(ids.shape)}; they must be alike"
            )
    rows, length = ids.shape
    if rows * length > shape.micro_tokens:
        raise BadInput(
            f"{name} has {rows} x {length} tokens, the engine was built for {shape.rows} x {shape.length}; "
            "raise per_device_train_batch_size or max_length"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise BadInput(f"{name}: token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    bad = (labels != IGNORE) & ((labels < 0) | (labels >= vocab_size))
    if bool(bad.any()):
        raise BadInput(f"{name}: label {int(labels[bad][0])} is neither a token of {vocab_size} nor {IGNORE}")


def _check_positions(index: int, micro: MicroBatch, num_positions: int | None) -> None:
    positions = micro.position_ids
    if positions is not None and int(positions.min()) < 0:
        raise BadInput(f"micro-batch {index}: position {int(positions.min())} is negative")
    if num_positions is not None:
        most = micro.input_ids.shape[1] if positions is None else int(positions.max()) + 1
        if most > num_positions:
            raise BadInput(
                f"micro-batch {index} has {most} positions, and the model's position table has {num_positions}: "
                "lower max_length"
            )
