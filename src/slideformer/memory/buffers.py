"""What each buffer of a plan is made of, and its allocation: everything that two lanes touch, once, at exact size.

`needs` is pure arithmetic, so a budget can be printed before anything is allocated; `allocate` follows it to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from slideformer.device import Device
from slideformer.layout import Layout
from slideformer.memory.disk import DiskFolder
from slideformer.memory.disk_extent import PAGE
from slideformer.memory.host import ALIGN, DEVICE_ALIGN, Arena, aligned
from slideformer.memory.state import Carved, Home, State, Twin
from slideformer.memory.stored import DTYPES, StoredTile
from slideformer.schedule import Buffer, Place, Plan
from slideformer.schedule.ops import STATE


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
    STAGING = "staging"  # the same, in whole pages
    DISK = "disk"  # an extent of a file
    CELL = "cell"  # a value of one lane, not bytes


@dataclass(frozen=True, slots=True)
class Need:
    tier: Tier
    numel: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return aligned(self.numel * self.dtype.itemsize, _ALIGN.get(self.tier, ALIGN))


_ALIGN = {Tier.DEVICE: DEVICE_ALIGN, Tier.STAGING: PAGE}


class Cell:
    """A buffer whose content is a Python value. Written and read by the lanes that the plan says."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: object = None


Held = torch.Tensor | Twin | Home | StoredTile | Cell
"""What a buffer is."""


def num_rows(layout: Layout, shape: BatchShape) -> int:
    """Most rows of the table that one batch can touch."""
    return min(layout.units[0].params[0].shape[0], shape.tokens)


def needs(plans: Iterable[Plan], layout: Layout, shape: BatchShape) -> dict[Buffer, Need]:
    """What every buffer of these plans takes."""
    listed = list(plans)
    sizes = _Sizes(layout, shape, {b for plan in listed for b in plan.on_disk()})
    return {b: sizes.need(b) for plan in listed for b in plan.buffers()}


class _Sizes:
    """Lengths that many buffers share, found once: a plan of an 8B model names twenty thousand buffers."""

    def __init__(self, layout: Layout, shape: BatchShape, on_disk: set[Buffer]) -> None:
        self.layout, self.shape, self.on_disk = layout, shape, on_disk
        blocks = [layout.units[u] for u in layout.blocks]
        self.block, self.trained_block = max(u.numel for u in blocks), max(u.train_numel for u in blocks)
        self.hidden = shape.micro_tokens * shape.hidden
        self.rows = num_rows(layout, shape) * layout.units[0].row_numel
        self.slice = layout.tiles(layout.output)[0].numel
        self.landings = [[t.numel for t in layout.tiles(u, trained=True)] for u in range(len(layout.units))]
        stored = {(str(b.place), b.index[0]) for b in on_disk if b.place in STATE}
        self.staged = {str(c): max((layout.tiles(u)[0].numel for p, u in stored if p == c), default=0) for c in STATE}
        self.largest_landing = max((tiles[0] for tiles in self.landings if tiles), default=0)

    def need(self, buffer: Buffer) -> Need:
        place, index = buffer
        layout, shape, dtype, fp32 = self.layout, self.shape, self.shape.dtype, torch.float32
        unit = index[0] if index else 0
        match place:
            case Place.WEIGHT | Place.RESIDUAL | Place.EXP_AVG | Place.EXP_AVG_SQ | Place.SPARE | Place.HOME:
                return Need(Tier.STATE)
            case Place.STAGED_STATE | Place.STAGED_WEIGHTS:
                content = str(STATE[unit])
                return Need(Tier.STAGING, self.staged[content], DTYPES[content])
            case Place.STAGED_SAVED:
                return Need(Tier.STAGING, self.hidden, dtype)
            case Place.CALL | Place.VERDICT | Place.GRAPH | Place.HEAD_STATE | Place.OTHER_ROWS:
                return Need(Tier.CELL)
            case Place.ROWS_HOST | Place.ROW_GRAD_HOST:
                return Need(Tier.LOCKED, self.rows, dtype)
            case Place.RING:
                return Need(Tier.LOCKED, self.largest_landing, dtype)
            case Place.GRAD_HOST:
                return Need(Tier.LOCKED, self.landings[unit][index[1]], dtype)
            case Place.SAVED:
                return Need(Tier.DISK if buffer in self.on_disk else Tier.LOCKED, self.hidden, dtype)
            case Place.NORM_HOST | Place.NORM:
                tier = Tier.DEVICE if place is Place.NORM else Tier.LOCKED
                return Need(tier, num_norms(layout, unit), fp32)
            case Place.LOSS_HOST | Place.LOSS:
                return Need(Tier.DEVICE if place is Place.LOSS else Tier.LOCKED, 1, fp32)
            case Place.BATCH:
                return Need(Tier.DEVICE, 5 * shape.tokens + num_rows(layout, shape), torch.int64)
            case Place.ROWS | Place.ROW_GRAD:
                return Need(Tier.DEVICE, self.rows, dtype)
            case Place.ROW_SUM:
                return Need(Tier.DEVICE, self.rows, fp32)
            case Place.SLOT:
                return Need(Tier.DEVICE, self.block, dtype)
            case Place.SLICE | Place.SLICE_GRAD | Place.SLICE_SUM:
                return Need(Tier.DEVICE, self.slice, fp32 if place is Place.SLICE_SUM else dtype)
            case Place.ROW_NORM:
                return Need(Tier.DEVICE, layout.units[layout.output].params[0].shape[0], fp32)
            case Place.HIDDEN:
                return Need(Tier.DEVICE, self.hidden, dtype)
            case Place.GRAD:
                return Need(Tier.DEVICE, self.trained_block, dtype)
            case Place.GRAD_SUM:
                return Need(Tier.DEVICE, self.trained_block, fp32)
            case Place.DENSE:
                return Need(Tier.DEVICE, layout.units[unit].numel, dtype)
            case Place.DENSE_GRAD:
                return Need(Tier.DEVICE, layout.units[unit].train_numel, dtype)
            case Place.DENSE_SUM:
                return Need(Tier.DEVICE, layout.units[unit].train_numel, fp32)


def num_norms(layout: Layout, unit: int) -> int:
    """Norms reported for a unit (or for one part of a vocabulary matrix): one per trained parameter."""
    return sum(p.trainable for p in layout.units[unit].params)


def allocate(
    plans: Iterable[Plan],
    layout: Layout,
    shape: BatchShape,
    state: State,
    device: Device,
    folder: DiskFolder | None = None,
) -> Made:
    """Every buffer of these plans; saved inputs on disk in a file of `folder`. Raises DoesNotFit naming the tier when
    there is no room."""
    return make(needs(plans, layout, shape), layout, state, device, folder)


class Made(NamedTuple):
    """arenas: page-locked; whoever lets go of the buffers before the device is closed unlocks them."""

    buffers: dict[Buffer, Held]
    arenas: tuple[Arena, ...]


def make(
    found: Mapping[Buffer, Need], layout: Layout, state: State, device: Device, folder: DiskFolder | None = None
) -> Made:
    """Every buffer of `needs`. Raises DoesNotFit naming the tier when there is no room."""
    locked = [(n.numel, n.dtype) for n in found.values() if n.tier is Tier.LOCKED]
    arena = Arena.of(locked, "gradient, saved-input and row buffers")
    there = Carved(device, sum(n.nbytes for n in found.values() if n.tier is Tier.DEVICE))
    staging = Arena(sum(n.nbytes for n in found.values() if n.tier is Tier.STAGING), "tiles between disk and host")
    stored = _saved_on_disk(found, folder)
    buffers: dict[Buffer, Held] = {}
    for buffer, need in found.items():
        match need.tier:
            case Tier.STATE:
                buffers[buffer] = _state_tile(buffer, layout, state)
            case Tier.CELL:
                buffers[buffer] = Cell()
            case Tier.DEVICE:
                buffers[buffer] = there.take(need.numel, need.dtype)
            case Tier.LOCKED:
                buffers[buffer] = arena.take(need.numel, need.dtype)
                buffers[buffer].zero_()  # touched now, so that no step pays for the pages
            case Tier.STAGING:
                buffers[buffer] = staging.take(need.numel, need.dtype, align=PAGE)
                buffers[buffer].zero_()
            case Tier.DISK:
                buffers[buffer] = stored[buffer]
    arena.page_lock(device)
    staging.page_lock(device)
    return Made(buffers, (arena, staging))


def _saved_on_disk(found: Mapping[Buffer, Need], folder: DiskFolder | None) -> dict[Buffer, StoredTile]:
    needed = {buffer: need for buffer, need in found.items() if need.tier is Tier.DISK}
    if not needed:
        return {}
    assert folder is not None, "saved inputs on disk without a folder for them"
    file = folder.file("saved", [n.numel * n.dtype.itemsize for n in needed.values()])
    return {b: StoredTile(file, i, n.numel, n.dtype) for i, (b, n) in enumerate(needed.items())}


def _state_tile(buffer: Buffer, layout: Layout, state: State) -> Held:
    if buffer.place is Place.HOME:
        return state.homes[buffer.index[0]]
    unit, index = buffer.index
    if (unit, index) in state.twins:
        return state.twins[unit, index]
    content = str(buffer.place)
    if state.stored is not None and (content, unit) in state.stored.pairs:
        return state.stored.tile(content, unit, index)
    tile = layout.tiles(unit)[index]
    plane: torch.Tensor = getattr(state.planes(unit), content)
    return plane[tile.start : tile.stop]
