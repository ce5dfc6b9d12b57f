"""How far reads from disk run ahead: the places of the rings between disk and host, by the virtual clock.

Deeper rings let the disk work through times in which the step asks for nothing, and keep nothing waiting; beyond some
depth they only take memory. A model of many tiles is tried as one of fewer blocks with the same shares of them on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slideformer.engine.costs import Costs, cost_of, disk_traffic
from slideformer.engine.offload import spread
from slideformer.engine.options import RING_PLACES, EngineOptions
from slideformer.layout import Layout
from slideformer.memory import Budget
from slideformer.memory.budget import NAMES
from slideformer.schedule import Place, build_step, joined_step_s
from slideformer.schedule.ops import DISK_LANES

log = logging.getLogger(__name__)

DEPTHS = (3, 4, 6, 8, 12, 16)
"""Tried in turn. Three at least: a tile that is read, one that is updated, one that is written."""

GAIN = 0.01
"""Of the step; a depth is enough if no deeper one gains more."""

MOST_TILES, LEAST_BLOCKS = 400, 6
"""Of the blocks that are tried: a depth then takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What the clock runs on."""

    layout: Layout
    options: EngineOptions
    costs: Costs


def with_ring(
    options: EngineOptions,
    layout: Layout,
    costs: Costs,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    used: Callable[[EngineOptions], Budget],
    host_nbytes: int,
) -> EngineOptions:
    """The options with `disk_ring` decided: the fewest places of which more gain less than GAIN of a step, as far as
    the host has room, and rings take less than what lies on disk, which must be decided. used: bytes by tier;
    host_nbytes: what there is."""
    if options.disk_ring != "auto":
        return options
    if not options.uses_disk:
        return replace(options, disk_ring=RING_PLACES)
    tried = cut(Tried(layout, options, costs))
    now = used(options)
    a_place = now.host.get(NAMES[Place.STAGED_STATE], 0) / RING_PLACES
    room = min(host_nbytes - now.host_nbytes + RING_PLACES * a_place, now.disk_nbytes)
    most = options.saved_on_disk // 2 if options.saved_on_disk else DEPTHS[-1]  # there is a ring each way for these
    depths = [depth for depth in DEPTHS if depth * a_place <= room and depth <= most] or [DEPTHS[0]]
    chosen = replace(options, disk_ring=_enough(tried, depths, hidden_size, dtype))
    if chosen.ring_places > RING_PLACES and used(chosen).host_nbytes > host_nbytes:
        chosen = replace(options, disk_ring=RING_PLACES)
    log.info("%d tiles in each ring between disk and host", chosen.ring_places)
    return chosen


def _enough(tried: Tried, depths: Sequence[int], hidden_size: int, dtype: torch.dtype) -> int:
    seconds: dict[int, float] = {}
    for depth in depths:
        seconds[depth], least = step_s(tried, depth, hidden_size, dtype)
        if seconds[depth] <= (1 + GAIN) * least:
            break  # nothing can gain more
    best = min(seconds.values())
    return next(depth for depth in depths if seconds[depth] <= (1 + GAIN) * best)


def step_s(tried: Tried, depth: int, hidden_size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of a step with rings of so many places, and what no depth makes shorter: the disk's bytes, and every other
    lane's work."""
    options = replace(tried.options, disk_ring=depth)
    plan = build_step(tried.layout, options.step_options(tried.layout, dtype))
    shape = options.batch_shape(hidden_size, dtype)
    cost_s = cost_of(tried.layout, shape, tried.costs)
    disk_s = sum(disk_traffic(plan, tried.layout, shape)) / tried.costs.rates.disk_nbytes
    worked: dict[str, float] = {}
    for op in plan.ops:
        if op.lane not in DISK_LANES:
            worked[op.lane] = worked.get(op.lane, 0.0) + cost_s(op)
    return max(joined_step_s(plan, cost_s), disk_s), max(disk_s, *worked.values())


def cut(whole: Tried) -> Tried:
    """With fewer of its blocks, and the same shares of them on disk and on the device."""
    layout, options = whole.layout, whole.options
    blocks, tiles = layout.blocks, max(len(layout.tiles(u)) for u in layout.blocks)
    num = max(MOST_TILES // tiles, LEAST_BLOCKS)
    if num >= len(blocks):
        return whole
    kept = [(2 * i + 1) * len(blocks) // (2 * num) for i in range(num)]  # of the blocks, spread over the model
    units = [u for u in range(len(layout.units)) if u not in blocks or u - blocks[0] in kept]
    index = {unit: i for i, unit in enumerate(units)}
    smaller = replace(layout, units=tuple(layout.units[u] for u in units))
    disk = [(content, index[unit]) for content, unit in options.disk if unit not in blocks]
    for content in dict.fromkeys(content for content, _ in options.disk):
        share = sum(c == content and u in blocks for c, u in options.disk) / len(blocks)
        disk += [(content, unit) for unit in spread(smaller.blocks)[: -int(-share * num // 1)]]

    def those(given: object) -> object:
        return tuple(index[u] for u in given if u in index) if isinstance(given, tuple) else given

    on_device = options.saved_on_device
    fewer = replace(
        options,
        disk=tuple(sorted(disk)),
        saved_on_disk=-(-options.saved_on_disk * num // len(blocks)),
        saved_over=-(-options.saved_over * num // len(blocks)),
        saved_on_device=on_device * num // len(blocks) if isinstance(on_device, int) else on_device,
        **{name: those(getattr(options, name)) for name in ("ahead", "late", "resident", "keep")},
    )
    return Tried(smaller, fewer, replace(whole.costs, blocks=tuple(whole.costs.blocks[i] for i in kept)))
