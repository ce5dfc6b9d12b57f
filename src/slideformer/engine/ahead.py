"""Which units a deferred update writes ahead of the verdict, from what this machine can do and has room for."""

from __future__ import annotations

import logging

from slideformer.engine.costs import Costs
from slideformer.engine.fit import host_room
from slideformer.engine.options import EngineOptions
from slideformer.layout import Layout
from slideformer.memory import Budget, size
from slideformer.schedule import choose_ahead

log = logging.getLogger(__name__)

SPARE_SHARE = 0.9
"""Of the host memory that is left; the rest is for whatever else the process needs."""

STATE_NBYTES = 12
"""Of one trained parameter."""


def auto_ahead(layout: Layout, options: EngineOptions, budget: Budget, costs: Costs) -> tuple[int, ...]:
    """The units, by what an update and a forward pass take and the memory that the host has left.

    budget: of the run without any.
    """
    spare_nbytes = host_room(options.max_host_memory).nbytes - budget.host_nbytes
    chosen = units_ahead(layout, options, spare_nbytes, costs)
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


def units_ahead(layout: Layout, options: EngineOptions, spare_nbytes: int, costs: Costs) -> tuple[int, ...]:
    """The same where the host has so much to spare. Of an eager update: none."""
    if options.update == "eager":
        return ()
    room = int(SPARE_SHARE * spare_nbytes) // STATE_NBYTES
    resident = options.resident if isinstance(options.resident, tuple) else ()
    resident += tuple({unit for _, unit in options.disk})  # nor have these a second copy
    ratio = _update_per_forward(layout, options, costs)
    return choose_ahead(layout, update_per_forward=ratio, room_numel=max(room, 0), resident=resident)


def _update_per_forward(layout: Layout, options: EngineOptions, costs: Costs) -> float:
    forward_s = options.micro_batches * sum(b.forward_s for b in costs.blocks)
    return sum(layout.units[u].numel for u in layout.blocks) / costs.streamed_update_numel / forward_s
