"""What each buffer of a plan is made of, and its allocation: everything that two lanes touch, once, at exact size.

`needs` is pure arithmetic, so a budget can be printed before anything is allocated; `allocate` follows it to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from slideformer.device import Device
from slideformer.layout import Layout, UnitKind
from slideformer.memory.host import Arena, aligned
from slideformer.memory.state import Moments, State, Twin
from slideformer.schedule import Buffer, Place, Plan


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest batch: micro_batches of [rows, length] tokens, hidden size, compute dtype."""

    micro_batches: int
    rows: int
    length: int
    hidden: int
    dtype: torch.dtype

    @property
    def micro_tokens(self) -> int:
        return self.rows * self.length

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.micro_tokens


class Tier(StrEnum):
    STATE = "state"  # part of `State`, not allocated here
    DEVICE = "device"
    LOCKED = "locked"  # page-locked host memory
    CELL = "cell"  # a value of one lane, not bytes


@dataclass(frozen=True, slots=True)
class Need:
    tier: Tier
    numel: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return aligned(self.numel * self.dtype.itemsize)


class Cell:
    """A buffer whose content is a Python value. Written and read by the lanes that the plan says."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: object = None


def num_rows(layout: Layout, shape: BatchShape) -> int:
    """Most rows of the table that one batch can touch."""
    return min(layout.units[0].params[0].shape[0], shape.tokens)


def needs(plans: Iterable[Plan], layout: Layout, shape: BatchShape) -> dict[Buffer, Need]:
    """What every buffer of these plans takes."""
    return {b: _need(b, layout, shape) for plan in plans for b in plan.buffers()}


def _need(buffer: Buffer, layout: Layout, shape: BatchShape) -> Need:
    place, index = buffer
    units, dtype, fp32 = layout.units, shape.dtype, torch.float32
    blocks = [u for u in units if u.kind is UnitKind.BLOCK]
    trained_block = max(u.train_numel for u in blocks)
    hidden = shape.micro_tokens * shape.hidden
    rows_numel = num_rows(layout, shape) * units[0].row_numel
    unit = index[0] if index else 0
    match place:
        case Place.WEIGHT | Place.RESIDUAL | Place.MOMENTS | Place.SPARE:
            return Need(Tier.STATE)
        case Place.CALL | Place.VERDICT:
            return Need(Tier.CELL)
        case Place.ROWS_HOST | Place.ROW_GRAD_HOST:
            return Need(Tier.LOCKED, rows_numel, dtype)
        case Place.RING:
            largest = max(t.numel for i in range(len(units)) for t in layout.tiles(i, trained=True)[:1])
            return Need(Tier.LOCKED, largest, dtype)
        case Place.GRAD_HOST:
            return Need(Tier.LOCKED, layout.tiles(unit, trained=True)[index[1]].numel, dtype)
        case Place.SAVED:
            return Need(Tier.LOCKED, hidden, dtype)
        case Place.NORM_HOST | Place.NORM:
            tier = Tier.DEVICE if place is Place.NORM else Tier.LOCKED
            return Need(tier, num_norms(layout, unit), fp32)
        case Place.LOSS_HOST | Place.LOSS:
            return Need(Tier.DEVICE if place is Place.LOSS else Tier.LOCKED, 1, fp32)
        case Place.BATCH:
            return Need(Tier.DEVICE, 5 * shape.tokens + num_rows(layout, shape), torch.int64)
        case Place.ROWS | Place.ROW_GRAD:
            return Need(Tier.DEVICE, rows_numel, dtype)
        case Place.ROW_SUM:
            return Need(Tier.DEVICE, rows_numel, fp32)
        case Place.SLOT:
            return Need(Tier.DEVICE, max(u.numel for u in blocks), dtype)
        case Place.HIDDEN:
            return Need(Tier.DEVICE, hidden, dtype)
        case Place.GRAD:
            return Need(Tier.DEVICE, trained_block, dtype)
        case Place.GRAD_SUM:
            return Need(Tier.DEVICE, trained_block, fp32)
        case Place.DENSE:
            return Need(Tier.DEVICE, units[unit].numel, dtype)
        case Place.DENSE_GRAD:
            return Need(Tier.DEVICE, units[unit].train_numel, dtype)
        case Place.DENSE_SUM:
            return Need(Tier.DEVICE, units[unit].train_numel, fp32)


def num_norms(layout: Layout, unit: int) -> int:
    """Norms reported for a unit (or for one part of a vocabulary matrix): one per trained parameter."""
    return sum(p.trainable for p in layout.units[unit].params)


def allocate(
    plans: Iterable[Plan], layout: Layout, shape: BatchShape, state: State, device: Device
) -> dict[Buffer, torch.Tensor | Moments | Twin | Cell]:
    """Every buffer of these plans. Raises DoesNotFit naming the tier when there is no room."""
    found = needs(plans, layout, shape)
    locked = [(n.numel, n.dtype) for n in found.values() if n.tier is Tier.LOCKED]
    arena = Arena.of(locked, "gradient, saved-input and row buffers")
    buffers: dict[Buffer, torch.Tensor | Moments | Twin | Cell] = {}
    for buffer, need in found.items():
        match need.tier:
            case Tier.STATE:
                buffers[buffer] = _state_tile(buffer, layout, state)
            case Tier.CELL:
                buffers[buffer] = Cell()
            case Tier.DEVICE:
                buffers[buffer] = device.empty(need.numel, need.dtype)
            case Tier.LOCKED:
                buffers[buffer] = arena.take(need.numel, need.dtype)
                buffers[buffer].zero_()  # touched now, so that no step pays for the pages
    arena.page_lock(device)
    return buffers


def _state_tile(buffer: Buffer, layout: Layout, state: State) -> torch.Tensor | Moments | Twin:
    unit, index = buffer.index
    if (unit, index) in state.twins:
        return state.twins[unit, index]
    tile = layout.tiles(unit)[index]
    if buffer.place is Place.MOMENTS:
        return Moments(*(m[tile.start : tile.stop] for m in state.moments[unit]))
    flat = state.weight[unit] if buffer.place is Place.WEIGHT else state.residual[unit]
    return flat[tile.start : tile.stop]
