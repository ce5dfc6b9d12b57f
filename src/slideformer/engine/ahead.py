"""Which units a deferred update writes ahead of the verdict, from what this machine can do and has room for."""

from __future__ import annotations

import logging

from slideformer.engine.costs import Costs
from slideformer.engine.options import EngineOptions
from slideformer.layout import Layout
from slideformer.memory import Budget, host_limit, resident_nbytes, size
from slideformer.schedule import choose_ahead

log = logging.getLogger(__name__)

SPARE_SHARE = 0.9
"""Of the host memory that is left; the rest is for whatever else the process needs."""

STATE_NBYTES = 12
"""Of one trained parameter."""


def auto_ahead(layout: Layout, options: EngineOptions, budget: Budget, costs: Costs) -> tuple[int, ...]:
    """The units, by what an update and a forward pass take.

    budget: of the run without any.
    """
    if options.update == "eager":
        return ()
    forward_s = options.micro_batches * sum(b.forward_s for b in costs.blocks)
    limits = [host_limit().nbytes - resident_nbytes()]
    if options.max_host_memory is not None:
        limits.append(options.max_host_memory)
    room = int(SPARE_SHARE * (min(limits) - budget.host_nbytes)) // STATE_NBYTES
    ratio = sum(layout.units[u].numel for u in layout.blocks) / costs.streamed_update_numel / forward_s
    resident = options.resident if isinstance(options.resident, tuple) else ()
    resident += tuple({unit for _, unit in options.disk})  # nor have these a second copy
    chosen = choose_ahead(layout, update_per_forward=ratio, room_numel=max(room, 0), resident=resident)
    if chosen:
        numel = sum(layout.units[u].numel for u in chosen)
        log.info(
            "%d of %d units (%s of second copies) are updated ahead of clipping: an update takes %.1f x a forward pass",
            len(chosen),
            len(layout.units),
            size(numel * STATE_NBYTES),
            ratio,
        )
    return chosen
