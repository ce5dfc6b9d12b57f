"""Which units a deferred update writes ahead of the verdict, from what this machine can do and has room for."""

from __future__ import annotations

import logging

from slideformer.device import Device
from slideformer.engine.options import EngineOptions
from slideformer.engine.rates import matrix_rate, update_rate
from slideformer.layout import Layout
from slideformer.memory import Budget, host_limit, resident_nbytes, size
from slideformer.native import HostKernels
from slideformer.schedule import choose_ahead

log = logging.getLogger(__name__)

FORWARD_SHARE = 0.7
"""A forward pass reaches this share of the rate of one large matrix product: 597 of 790 TFLOP/s for a block of the
Llama-3.2-3B shape at 32 x 1024 tokens, attention not counted (H200, 2026-11-30)."""

SPARE_SHARE = 0.9
"""Of the host memory that is left; the rest is for whatever else the process needs."""

STATE_NBYTES = 12
"""Of one trained parameter."""


def auto_ahead(
    layout: Layout, options: EngineOptions, budget: Budget, device: Device, kernels: HostKernels
) -> tuple[int, ...]:
    """The units, chosen by short measurements. None on the CPU, where forward is never shorter than the update.

    budget: of the run without any.
    """
    if device.kind == "cpu" or options.update == "eager":
        return ()
    tokens = options.micro_batches * options.micro_batch_size * options.max_length
    forward_s = 2 * tokens / (FORWARD_SHARE * matrix_rate(device))
    limits = [host_limit().nbytes - resident_nbytes()]
    if options.max_host_memory is not None:
        limits.append(options.max_host_memory)
    room = int(SPARE_SHARE * (min(limits) - budget.host_nbytes)) // STATE_NBYTES
    ratio = 1 / update_rate(kernels) / forward_s
    chosen = choose_ahead(layout, update_per_forward=ratio, room_numel=max(room, 0))
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
