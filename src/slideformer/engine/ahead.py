"""Which units a deferred update writes ahead of the verdict, from what this machine can do and has room for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from slideformer.engine.costs import Costs
from slideformer.engine.fit import spare_room
from slideformer.engine.options import EngineOptions
from slideformer.layout import Layout
from slideformer.memory import Budget, size
from slideformer.schedule import choose_ahead

log = logging.getLogger(__name__)

SPARE_SHARE = 0.9
"""Of the host memory that is left; the rest is for whatever else the process needs."""

STATE_NBYTES = 12
"""Of one trained parameter."""

TRIED = 8
"""Numbers of units, between none and all that have room, at which the clock is asked first; then around the best."""

MANY_TILES = 1500
"""Of a model whose plans take too long to be tried (25 B parameters in tiles of 16 Mi: about 30 times 0.3 s)."""

TOLERANCE = 1.005
"""Steps that differ by less are alike to the clock; of those the one with the least memory is taken."""


StepTime = Callable[[EngineOptions, bool], float]
"""Seconds of a step by the clock: with these options, clipped or not."""


def auto_ahead(
    layout: Layout, options: EngineOptions, budget: Budget, costs: Costs, step_s: StepTime
) -> tuple[int, ...]:
    """The units, by the clock and the memory that the host has left.

    budget: of the run without any.
    """
    spare_nbytes = spare_room(options.max_host_memory) - budget.host_nbytes
    chosen = fastest_ahead(layout, options, spare_nbytes, costs, step_s)
    if chosen:
        numel = sum(layout.units[u].numel for u in chosen)
        log.info(
            "%d of %d units (%s of second copies) are updated ahead of clipping: an update takes %.1f x a forward pass",
            len(chosen),
            len(layout.units),
            size(numel * STATE_NBYTES),
            _update_per_forward(layout, options, costs),
        )
    return chosen


def fastest_ahead(
    layout: Layout, options: EngineOptions, spare_nbytes: int, costs: Costs, step_s: StepTime
) -> tuple[int, ...]:
    """The fewest first units with which a step is fastest, clipped as often as not.

    Where nothing is clipped, those that the forward cannot hide are enough. A clipped step is shorter the more units
    write their weights first, as long as the completion of what they left has room under forward and backward.
    """
    least = units_ahead(layout, options, spare_nbytes, costs)
    if options.update == "eager" or sum(len(layout.tiles(u)) for u in range(len(layout.units))) > MANY_TILES:
        return least
    every = units_ahead(layout, options, spare_nbytes, costs, all_of_them=True)
    if not every:
        return ()
    sums: dict[int, float] = {}

    def measure(numbers: Iterable[int]) -> int:
        for number in sorted({min(max(n, 0), len(every)) for n in numbers} - set(sums)):
            trial = replace(options, ahead=every[:number])
            sums[number] = sum(step_s(trial, clipped) for clipped in {False, options.max_grad_norm > 0})
        return min(sums, key=lambda number: (sums[number], number))

    apart = max(len(every) // TRIED, 1)
    best = measure((len(least), *range(0, len(every) + apart, apart)))
    while apart > 1:
        apart //= 2
        best = measure((best - apart, best + apart))
    return every[: min(number for number, total in sums.items() if total <= TOLERANCE * sums[best])]


def units_ahead(
    layout: Layout, options: EngineOptions, spare_nbytes: int, costs: Costs, *, all_of_them: bool = False
) -> tuple[int, ...]:
    """Those that a forward pass cannot hide, where the host has so much to spare; by sizes alone. Of an eager update:
    none. all_of_them: that there is room for."""
    if options.update == "eager":
        return ()
    room = int(SPARE_SHARE * spare_nbytes) // STATE_NBYTES
    resident = options.resident if isinstance(options.resident, tuple) else ()
    resident += tuple({unit for _, unit in options.disk})  # nor have these a second copy
    ratio = math.inf if all_of_them else _update_per_forward(layout, options, costs)
    return choose_ahead(layout, update_per_forward=ratio, room_numel=max(room, 0), resident=resident)


def _update_per_forward(layout: Layout, options: EngineOptions, costs: Costs) -> float:
    forward_s = options.micro_batches * sum(b.forward_s for b in costs.blocks)
    return sum(layout.units[u].numel for u in layout.blocks) / costs.streamed_update_numel / forward_s
