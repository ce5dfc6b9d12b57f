"""A model of 3.2 G parameters and what its ops cost on the machine of the first measurements, to simulate with.

28 blocks of 100 M parameters and a tied vocabulary matrix of 24 tiles; one H200, 16 host cores: 53 GB/s each way at
once, 4.1 Gparam/s of updates, and per step of 32 x 1024 tokens 11 ms a block forward, 33 ms backward, 130 ms the head.
"""

from __future__ import annotations

from collections.abc import Callable

from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.schedule import LaneName, Op, OpKind, Plan, StepOptions

NUM_BLOCKS, HIDDEN, VOCABULARY = 28, 3072, 128256
LINK_S, UPDATE_S, LAUNCH_S = 1 / 53e9, 1 / 4.1e9, 10e-6  # seconds a byte, a parameter, an op
FORWARD_S, BACKWARD_S, HEAD_S, EMBED_S = 11e-3, 33e-3, 130e-3, 1e-3  # a step of 32 x 1024 tokens
ROWS = 12_000  # rows of the vocabulary matrix that a batch touches


def layout_3b() -> Layout:
    units = [Unit("table", UnitKind.TABLE, (Param("table", (VOCABULARY, HIDDEN)),))]
    for b in range(NUM_BLOCKS):
        params = (Param(f"w{b}", (100_000_000,)), Param(f"n{b}", (2 * HIDDEN,), decay=False))
        units.append(Unit(f"block.{b}", UnitKind.BLOCK, params))
    units.append(Unit("final", UnitKind.FINAL, (Param("final", (HIDDEN,), decay=False),)))
    return Layout(tuple(units), 16 << 20, tied=True)


def costs(layout: Layout, options: StepOptions, *, batch: float = 1.0) -> Callable[[Op], float]:
    """Seconds of each op. batch: tokens of a step as a share of 32 x 1024."""
    share = batch / options.micro_batches
    num_rows = round(ROWS * min(2 * batch, 1.0)) * HIDDEN
    hidden = 2 * 32 * 1024 * HIDDEN * LINK_S
    per_step = {
        OpKind.FORWARD: FORWARD_S,
        OpKind.BACKWARD: BACKWARD_S,
        OpKind.HEAD: HEAD_S,
        OpKind.HEAD_LOSS: HEAD_S / 3,
        OpKind.EMBED: EMBED_S,
        OpKind.EMBED_BACKWARD: EMBED_S,
        OpKind.SPILL: hidden,
        OpKind.FETCH: hidden,
    }
    per_element = {
        OpKind.UPLOAD: 2 * LINK_S,
        OpKind.DOWNLOAD: 2 * LINK_S,
        OpKind.UPLOAD_ROWS: 2 * LINK_S,
        OpKind.DOWNLOAD_ROWS: 2 * LINK_S,
        OpKind.GATHER: 2 * LINK_S,
        OpKind.UPDATE: UPDATE_S,
        OpKind.UPDATE_TABLE: UPDATE_S,
        OpKind.UPDATE_REST: UPDATE_S,
        OpKind.UPDATE_ROWS: UPDATE_S,
        OpKind.UPDATE_AHEAD: UPDATE_S,
        OpKind.REST_AHEAD: UPDATE_S,
        OpKind.SETTLE_ROWS: UPDATE_S,  # of the touched rows; where nothing is clipped the rest changes hands
    }

    def num_elements(op: Op) -> float:
        touched = num_rows / len(layout.tiles(op.unit))
        match op.kind:
            case OpKind.GATHER | OpKind.UPDATE_ROWS | OpKind.SETTLE_ROWS:
                return touched
            case OpKind.UPLOAD_ROWS | OpKind.DOWNLOAD_ROWS:
                return num_rows
            case OpKind.UPDATE_REST | OpKind.REST_AHEAD:
                return layout.tiles(op.unit)[op.tile].numel - touched
        return layout.tiles(op.unit)[op.tile].numel

    def seconds(op: Op) -> float:
        if op.kind in per_step:
            return per_step[op.kind] * share
        if op.kind in per_element:
            return per_element[op.kind] * num_elements(op) + LAUNCH_S
        return LAUNCH_S

    return seconds


def work_s(plan: Plan, seconds: Callable[[Op], float], lane: LaneName) -> float:
    """Time of a lane's ops, one behind the other."""
    return sum(seconds(op) for op in plan.ops if op.lane is lane)
