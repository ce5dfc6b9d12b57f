"""What of the state and of the saved inputs lies on disk: by the shares that were given, or as much as the host lacks.

Every step moves what is on disk: moments and residuals once out and once back, weights twice more for their uploads,
saved inputs once out and once back. So weights go last. Blocks are taken evenly spread over the model, so that the
disk has as much to do in every part of a step; vocabulary matrices, whose rows are updated twice, after all blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from slideformer.engine.options import RING_PLACES, EngineOptions
from slideformer.layout import Layout, UnitKind
from slideformer.memory import Budget, padded
from slideformer.memory.budget import NAMES
from slideformer.memory.host import aligned
from slideformer.memory.state import plane_numel
from slideformer.memory.stored import DTYPES
from slideformer.schedule import Place

log = logging.getLogger(__name__)

MOMENTS, RESIDUALS, WEIGHTS = ("exp_avg_sq", "exp_avg"), ("residual",), ("weight",)

RINGS = (RING_PLACES, 2, 1)
"""Tiles in a ring, tried in turn until it fits."""

MOST_TRIES = 4
"""Bytes are added up pair by pair first; what alignment adds to that is made up for in further tries."""

Pair = tuple[str, int]


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What a run takes on the host (`used`, some seconds for a large model), and how much there may be; None: no limit
    is known. saved_nbytes: of one saved input."""

    layout: Layout
    dtype: torch.dtype
    used: Callable[[EngineOptions], Budget]
    nbytes: int | None
    saved_nbytes: int


def offloaded(options: EngineOptions, room: HostRoom) -> EngineOptions:
    """The options with `disk`, `saved_on_disk` and `saved_over` decided by `options.offload`. What is resident must be
    decided.

    Shares are of the bytes that would lie on the host, and are kept to the unit that comes nearest.
    """
    if options.offload is None or options.offload_dir is None:
        return options
    if options.disk_ring != "auto" or room.nbytes is None:
        return _with_rings(options, room)
    found: list[EngineOptions] = []
    for places in RINGS:
        trial = options if places == options.ring_places else replace(options, disk_ring=places)
        found.append(_with_rings(trial, room))
        if room.used(found[-1]).host_nbytes <= room.nbytes:
            break
    chosen = min(found, key=lambda trial: (room.used(trial).host_nbytes > room.nbytes, -trial.ring_places))
    if chosen.ring_places < RINGS[0]:
        log.warning(
            "each ring between disk and host has %d of the usual %d tiles, since more would not fit, so reads run less "
            "far ahead: a smaller tile_numel gives more of them room",
            chosen.ring_places,
            RINGS[0],
        )
    return chosen


def _with_rings(options: EngineOptions, room: HostRoom) -> EngineOptions:
    """With rings of so many places."""
    given = options.offload
    assert given is not None
    moments, planes = _pairs(room, options, MOMENTS), _pairs(room, options, (*RESIDUALS, *WEIGHTS))
    disk = [*_share(room, moments, given.moments or 0.0), *_share(room, planes, given.planes or 0.0)]
    chosen = replace(options, disk=tuple(sorted(disk)))
    if given.saved:
        chosen = _with_saved(chosen, round(given.saved * _num_saved(room, options)), room)
    if room.nbytes is None or None not in (given.moments, given.planes, given.saved):
        return chosen
    excess = room.used(chosen).host_nbytes - room.nbytes
    if excess <= 0:
        return chosen
    first = [p for p in moments if given.moments is None]
    first += [p for p in planes if p[0] in RESIDUALS and given.planes is None]
    last = [p for p in planes if p[0] in WEIGHTS and given.planes is None]
    for _ in range(MOST_TRIES):
        chosen, left = _less(chosen, first, excess, room)
        if left > 0 and given.saved is None:
            chosen, left = _saved_too(chosen, left, room)
        if left > 0:
            chosen, left = _less(chosen, last, left, room)
        still = room.used(chosen).host_nbytes - room.nbytes
        if still <= 0 or left > 0:
            return chosen
        excess = still
    return chosen


def _less(options: EngineOptions, pairs: list[Pair], excess: int, room: HostRoom) -> tuple[EngineOptions, int]:
    """With as many more pairs on disk as make up for the excess of bytes, and what is left of it. The first pair of a
    content costs staging memory; a content of which all is less than that stays on the host."""
    disk = set(options.disk)
    worth = {
        content for content, _ in pairs if _all_nbytes(room, pairs, content) > _staging_nbytes(room, options, content)
    }
    for pair in pairs:
        if excess <= 0:
            break
        if pair not in disk and pair[0] in worth:
            staging = 0 if any(content == pair[0] for content, _ in disk) else _staging_nbytes(room, options, pair[0])
            disk.add(pair)
            excess += staging - _nbytes(room, pair)
    return replace(options, disk=tuple(sorted(disk))), excess


def _all_nbytes(room: HostRoom, pairs: list[Pair], content: str) -> int:
    return sum(_nbytes(room, pair) for pair in pairs if pair[0] == content)


def _saved_too(options: EngineOptions, excess: int, room: HostRoom) -> tuple[EngineOptions, int]:
    """With as many saved inputs on disk as make up for the excess of bytes, and what is left of it."""
    per_saved = room.saved_nbytes
    staging = 0 if options.gds or options.saved_on_disk else 2 * options.ring_places * per_saved
    more = min(-(-(excess + staging) // per_saved), _num_saved(room, options) - options.saved_on_disk)
    if more * per_saved <= staging:
        return options, excess
    return _with_saved(options, options.saved_on_disk + more, room), excess + staging - more * per_saved


def _with_saved(options: EngineOptions, num: int, room: HostRoom) -> EngineOptions:
    """So many saved inputs on disk, evenly among all: the first ones alone come to the disk, and are needed again,
    faster than it takes and gives them (3B at 16 x 4096, 13 of 28, rings of 8, 2.2 GB/s: 3.49 s a step by the clock,
    2.98 for these; 3.56 to 3.67 were measured of the first ones on an H200, 2026-11-30)."""
    return replace(options, saved_on_disk=num, saved_over=_num_saved(room, options) if num else 0)


def _staging_nbytes(room: HostRoom, options: EngineOptions, content: str) -> int:
    tile = max(room.layout.tiles(u)[0].numel for u in range(len(room.layout.units)))
    joined = room.dtype is torch.float32  # in the host's memory, from both planes
    rings = 2 if content in WEIGHTS and (joined or not options.gds) or joined and content in RESIDUALS else 1
    return rings * options.ring_places * padded(tile * DTYPES[content].itemsize)


def _num_saved(room: HostRoom, options: EngineOptions) -> int:
    """Positions of saved inputs beside those on the device."""
    all_on_host = room.used(replace(options, disk=(), saved_on_disk=0))
    return all_on_host.host.get(NAMES[Place.SAVED], 0) // aligned(room.saved_nbytes)


def _share(room: HostRoom, pairs: list[Pair], share: float) -> Iterator[Pair]:
    """The first pairs, up to the one whose end comes nearest to the share of all their bytes."""
    left = share * sum(_nbytes(room, pair) for pair in pairs)
    for pair in pairs:
        nbytes = _nbytes(room, pair)
        if left < nbytes / 2:
            return
        left -= nbytes
        yield pair


def _pairs(room: HostRoom, options: EngineOptions, contents: tuple[str, ...]) -> list[Pair]:
    """Of units that are neither resident nor have a second copy, content by content, blocks spread over the model."""
    elsewhere = {*options.step_options(room.layout, room.dtype).resident}
    elsewhere |= set() if options.ahead == "auto" else set(options.ahead)
    units = [u for u in (*spread(room.layout.blocks), *_others(room.layout)) if u not in elsewhere]
    pairs = [(content, unit) for content in contents for unit in units]
    return [pair for pair in pairs if _nbytes(room, pair)]


def _others(layout: Layout) -> list[int]:
    """Small units before the vocabulary matrices, and of those the table last."""
    order = (UnitKind.FINAL, UnitKind.GLUE, UnitKind.OUTPUT, UnitKind.TABLE)
    found = (layout.find(kind) for kind in order)
    return [unit for unit in found if unit is not None]


def spread(blocks: tuple[int, ...]) -> list[int]:
    """An order of which every beginning lies evenly over the whole: the bits of each index turned round (van der
    Corput)."""
    width = max(len(blocks) - 1, 1).bit_length()
    turned = sorted(range(len(blocks)), key=lambda i: int(f"{i:0{width}b}"[::-1], 2))
    return [blocks[i] for i in turned]


def _nbytes(room: HostRoom, pair: Pair) -> int:
    content, unit = pair
    keep_residual = room.dtype is torch.float32
    return plane_numel(room.layout, unit, content, keep_residual=keep_residual) * DTYPES[content].itemsize
