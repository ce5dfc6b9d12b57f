"""What the ops of a pass of generation take, from a machine's rates: seconds on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable

from slideformer.engine.costs import Rates
from slideformer.layout import Layout
from slideformer.memory.passes import PassShape
from slideformer.schedule import Op, OpKind, PassOptions, build_pass, joined_step_s

LAUNCH_S = 4e-4
"""Of the kernels of one block, or one stage of the head, by Python: some 20 kernels of 15 to 20 us each."""


def pass_cost_of(layout: Layout, shape: PassShape, rates: Rates, *, first: bool) -> Callable[[Op], float]:
    """Seconds of each op for full micro-batches; of a later pass, half-way from the prompts to the end."""
    new = shape.prompt_length if first else 1
    cached = 0 if first else (shape.prompt_length + shape.length) // 2
    tokens, itemsize = shape.rows * new, shape.dtype.itemsize
    position_nbytes = shape.rows * shape.cache_numel * itemsize

    def products_s(numel: int, num_tokens: int) -> float:
        """Whichever takes longer: to multiply, or to read the weights and the keys and values."""
        read = numel * itemsize + cached * position_nbytes
        return LAUNCH_S + max(2 * numel * num_tokens / rates.flops, read / rates.device_nbytes)

    def seconds(op: Op) -> float:
        match op.kind:
            case OpKind.UPLOAD:
                return layout.tiles(op.unit)[op.tile].numel * itemsize / rates.link_nbytes
            case OpKind.FORWARD_CACHED:
                return products_s(layout.units[op.unit].numel, tokens)
            case OpKind.HEAD_LOGITS:
                unit = layout.units[op.unit]
                numel = layout.tiles(op.unit)[op.tile].numel if op.tile >= 0 else unit.numel
                return products_s(numel, shape.rows * shape.micro_batches)
            case OpKind.FETCH_CACHE:
                return cached * position_nbytes / rates.link_nbytes
            case OpKind.SPILL_CACHE:
                return new * position_nbytes / rates.link_nbytes
            case OpKind.UPLOAD_ROWS:
                return tokens * shape.micro_batches * shape.hidden * itemsize / rates.link_nbytes
            case OpKind.EMBED_CACHED | OpKind.HEAD_LAST | OpKind.HEAD_PICK | OpKind.NEXT | OpKind.TAKE:
                return LAUNCH_S
            case OpKind.GATHER:
                return tokens * shape.micro_batches * shape.hidden * itemsize / rates.host_nbytes / 4
        return 0.0

    return seconds


def predicted_pass_s(layout: Layout, shape: PassShape, options: PassOptions, rates: Rates) -> float:
    """Of a later pass among others."""
    plan = build_pass(layout, options)
    return joined_step_s(plan, pass_cost_of(layout, shape, rates, first=False), runs=4)
