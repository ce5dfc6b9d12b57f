"""What an op is said to cost, worked out by hand for a layout of three numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slideformer.engine.costs import Rates, assumed, cost_of, largest_block_numel
from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.memory import BatchShape
from slideformer.schedule import Access, Buffer, LaneName, Op, OpKind, Place, StepOptions, Update, build_step

VOCAB, HIDDEN = 100, 8
TABLE = Unit("table", UnitKind.TABLE, (Param("embed", (VOCAB, HIDDEN)),))
BLOCK = Unit("block.0", UnitKind.BLOCK, (Param("w", (8, 32)), Param("frozen", (8, 16), trainable=False)))
LAYOUT = Layout((TABLE, BLOCK), tile_numel=256, tied=True)
SHAPE = BatchShape(2, 3, 5, HIDDEN, torch.bfloat16)  # 2 micro-batches of 3 x 5 tokens
RATES = Rates(flops=1000.0, link_nbytes=10.0, update_numel=7.0, host_nbytes=20.0, device_nbytes=50.0)
TOKENS, ROWS = 15, 30


@pytest.mark.parametrize(
    ("kind", "unit", "tile", "seconds"),
    [
        (OpKind.FORWARD, 1, -1, 2 * 384 * TOKENS / 1000),
        (OpKind.BACKWARD, 1, -1, 3 * 2 * 384 * TOKENS / 1000),
        (OpKind.HEAD, 0, -1, 3 * 2 * VOCAB * HIDDEN * TOKENS / 1000),
        (OpKind.HEAD_LOSS, 0, -1, 2 * VOCAB * HIDDEN * TOKENS / 1000),
        (OpKind.UPLOAD, 1, 1, 128 * 2 / 10),
        (OpKind.DOWNLOAD, 1, 0, 256 * 2 / 10),
        (OpKind.UPDATE, 1, 0, 256 / 7),
        (OpKind.SPILL, 1, -1, TOKENS * HIDDEN * 2 / 10),
        (OpKind.UPLOAD_ROWS, 0, -1, ROWS * HIDDEN * 2 / 10),
        (OpKind.GATHER, 0, 0, 256 * ROWS / VOCAB * 2 / 20),
        (OpKind.UPDATE_AHEAD, 1, 0, 1.1 * 256 / 7),
        (OpKind.REST_AHEAD, 0, 0, 1.1 * 256 * (1 - ROWS / VOCAB) / 7),
        (OpKind.SETTLE, 1, 0, 0.0),
        (OpKind.COMPLETE, 1, 0, 0.0),
        (OpKind.SETTLE_ROWS, 0, 0, 256 * (ROWS / VOCAB) ** 2 / 7),
        (OpKind.SETTLE_OTHERS, 0, 0, 256 * ROWS / VOCAB * (1 - ROWS / VOCAB) / 7),
        (OpKind.COMPLETE_ROWS, 0, 0, 0.0),
        (OpKind.UPDATE_TABLE, 0, 0, 256 / 7),
        (OpKind.UPDATE_ROWS, 0, 0, 256 * ROWS / VOCAB / 7),
        (OpKind.UPDATE_REST, 0, 0, 256 * (1 - ROWS / VOCAB) / 7),
        (OpKind.REPORT, 1, -1, 0.0),
        (OpKind.FORWARD_KEEP, 1, -1, 2 * 384 * TOKENS / 1000),
        (OpKind.BACKWARD_KEPT, 1, -1, 2 * 2 * 384 * TOKENS / 1000),
        (OpKind.UPDATE_RESIDENT, 1, -1, 256 * 26 / 50),
        (OpKind.UPDATE_RESIDENT_TABLE, 0, -1, VOCAB * HIDDEN * 26 / 50),
        (OpKind.PICK_ROWS, 0, -1, 2 * ROWS * HIDDEN * 2 / 50),
    ],
)
def test_an_op_takes_its_bytes_or_operations_over_the_rate(kind, unit, tile, seconds) -> None:
    op = Op(kind, LaneName.COMPUTE, (), unit=unit, tile=tile)
    assert cost_of(LAYOUT, SHAPE, assumed(LAYOUT, SHAPE, RATES))(op) == pytest.approx(seconds)


def test_of_a_clipped_step_weights_and_the_rest_are_written_apart_and_nothing_ahead() -> None:
    """As measured, times an update in place."""
    cost_s = cost_of(LAYOUT, SHAPE, assumed(LAYOUT, SHAPE, RATES), clipped=True)
    settled, completed = 0.73, 1.03
    for unit, ahead, settle, complete in (
        (0, OpKind.REST_AHEAD, OpKind.SETTLE_ROWS, OpKind.COMPLETE_ROWS),
        (1, OpKind.UPDATE_AHEAD, OpKind.SETTLE, OpKind.COMPLETE),
    ):
        for kind, share in ((ahead, 0.0), (settle, settled), (complete, completed)):
            op = Op(kind, LaneName.UPDATE, (), unit=unit, tile=0)
            assert cost_s(op) == pytest.approx(share * 256 / 7), kind
    assert cost_s(Op(OpKind.SETTLE_OTHERS, LaneName.UPDATE, (), unit=0, tile=0)) == 0.0
    assert cost_s(Op(OpKind.UPDATE, LaneName.UPDATE, (), unit=1, tile=0)) == pytest.approx(256 / 7)


@pytest.mark.parametrize(
    ("kind", "lane", "buffer", "nbytes"),
    [
        (OpKind.UPLOAD, LaneName.DISK_FEED, Buffer(Place.WEIGHT, (1, 1)), 128 * 2),
        (OpKind.SPILL, LaneName.DISK_SPILL, Buffer(Place.SAVED, (0,)), TOKENS * HIDDEN * 2),
        (OpKind.FETCH, LaneName.DISK_FETCH, Buffer(Place.SAVED, (0,)), TOKENS * HIDDEN * 2),
    ],
)
def test_what_goes_straight_between_disk_and_device_takes_the_disks_time(kind, lane, buffer, nbytes) -> None:
    op = Op(kind, lane, (Access("any", buffer, ("x",), None),), unit=1, tile=1)
    rates = replace(RATES, disk_nbytes=4.0)
    assert cost_of(LAYOUT, SHAPE, assumed(LAYOUT, SHAPE, rates))(op) == pytest.approx(nbytes / 4)


@pytest.mark.parametrize("update", Update)
def test_every_parameter_is_updated_once_in_the_time_of_a_plan(update) -> None:
    plan = build_step(LAYOUT, StepOptions(window=1, grad_slots=1, micro_batches=2, hidden_pool=9, update=update))
    cost_s = cost_of(LAYOUT, SHAPE, assumed(LAYOUT, SHAPE, RATES))
    spent = sum(cost_s(op) for op in plan.ops if op.lane is LaneName.UPDATE)
    assert spent == pytest.approx(LAYOUT.train_numel / 7)


def test_rates_that_are_known_replace_assumed_ones() -> None:
    assert RATES.known(flops=5.0, link_nbytes=None, update_numel=None) == Rates(5.0, 10.0, 7.0, 20.0, 50.0)


def test_a_slot_holds_the_largest_block() -> None:
    assert largest_block_numel(LAYOUT) == 384
