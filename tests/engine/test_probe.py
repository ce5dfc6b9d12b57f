"""The trial runs of blocks and head: on the CPU, where there is nothing to place, their arithmetic can be looked at."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine.toys import LENGTH, ROWS, toy_decoder, toy_options
from slideformer.device.cpu import CpuDevice
from slideformer.engine.costs import BlockCost
from slideformer.engine.fit import budget_of
from slideformer.engine.probe import _Trial, probe
from slideformer.engine.settle import settle
from slideformer.errors import DoesNotFit
from slideformer.native import load


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt2", True), ("gemma2", True), ("phi", False)])
@pytest.mark.parametrize("frozen", [(), (r"layers\.1\.|h\.1\.",)], ids=["all", "one block frozen"])
def test_every_block_and_the_head_take_some_time(family, tied, frozen, monkeypatch):
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    monkeypatch.setattr("slideformer.engine.probe.UPDATE_NUMEL", 1 << 16)
    decoder = toy_decoder(family, tied=tied, dtype=torch.bfloat16, frozen=frozen)
    kernels = load(1)
    try:
        with CpuDevice() as device:
            costs = probe(decoder, device, toy_options(), kernels)
    finally:
        kernels.close()
    assert costs.measured and len(costs.blocks) == len(decoder.layout.blocks)
    for block in costs.blocks:
        assert 0 < block.forward_s < 1 and 0 < block.backward_s < 1 and 0 < block.kept_forward_s < 1
    for head in (costs.head, costs.sliced_head):
        assert 0 < head.loss_s < 1 and 0 < head.grads_s < 1
    assert all(rate > 0 for rate in (costs.rates.flops, costs.rates.link_nbytes, costs.rates.update_numel))


def test_blocks_of_one_kind_are_tried_once(monkeypatch):
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    tried = []
    block = _Trial.block
    monkeypatch.setattr(_Trial, "block", lambda self, unit: tried.append(unit) or block(self, unit))
    monkeypatch.setattr("slideformer.engine.probe.UPDATE_NUMEL", 1 << 16)
    kernels = load(1)
    try:
        with CpuDevice() as device:
            for family, frozen, units in (
                ("llama", (), [1]),
                ("gemma2", (), [1, 2]),
                ("llama", (r"layers\.[01]\.",), [1, 3]),  # what is frozen keeps less for backward
            ):
                probe(toy_decoder(family, dtype=torch.bfloat16, frozen=frozen), device, toy_options(), kernels)
                assert tried == units, family
                tried.clear()
    finally:
        kernels.close()


def test_where_the_whole_head_has_no_room_a_tile_of_it_is_measured(monkeypatch):
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    decoder = toy_decoder(dtype=torch.bfloat16, tile=640)
    with CpuDevice() as device:
        trial = _Trial(decoder, device, toy_options())
        head = trial.sliced_head()
    assert 0 < head.loss_s < 5 and 0 < head.grads_s < 5


@pytest.mark.parametrize(
    ("family", "masks", "head_dim"),
    [("llama", 0, 16), ("gemma2", 2, 24)],  # the other has one mask for each of its kinds of blocks
)
def test_masks_and_tables_are_counted_for_every_micro_batch(family, masks, head_dim, monkeypatch):
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    monkeypatch.setattr("slideformer.engine.probe.UPDATE_NUMEL", 1 << 16)
    decoder, options, kernels = toy_decoder(family, dtype=torch.bfloat16), toy_options(micro_batches=3), load(1)
    try:
        with CpuDevice() as device:
            costs = probe(decoder, device, options, kernels)
    finally:
        kernels.close()
    one = masks * 2 * ROWS * LENGTH * LENGTH + 2 * 2 * LENGTH * head_dim + 8 * LENGTH
    assert costs.call_nbytes == one
    sizes = {"hidden_size": decoder.hidden_size, "dtype": decoder.dtype}
    assert budget_of(decoder.layout, options, **sizes, costs=costs).device["masks and positions"] == 4 * one


class Card(CpuDevice):
    """Memory of its own, enough for anything but a block of more rows than `most`."""

    kind = "cuda"
    most = 2

    def free_nbytes(self) -> int:
        return 1 << 40


def test_a_try_with_fewer_rows_finds_what_the_one_before_held_free_again(monkeypatch):
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    monkeypatch.setattr("slideformer.engine.probe.UPDATE_NUMEL", 1 << 16)
    block, held, seen = _Trial.block, [], []

    def block_on_the_card(trial: _Trial, unit: int) -> BlockCost:
        if not held or held[-1][0] != trial.rows:
            seen.append([rows for rows, tensor in held if tensor() is not None])
            held.append((trial.rows, weakref.ref(trial.hidden)))
        if trial.rows > Card.most:
            weights = trial.random(1000)
            held.append((trial.rows, weakref.ref(weights)))
            raise torch.OutOfMemoryError(f"no room for gradients of {weights.numel()} weights")
        return block(trial, unit)

    monkeypatch.setattr(_Trial, "block", block_on_the_card)
    decoder, kernels = toy_decoder(dtype=torch.bfloat16), load(1)
    asked = toy_options(micro_batch_size=8, find_micro_batch=True)
    try:
        with Card() as device:
            found = settle(asked, decoder, device, kernels)
            assert (found.options.micro_batches, found.options.micro_batch_size) == (4, Card.most)
            monkeypatch.setattr(Card, "most", 0)
            with pytest.raises(DoesNotFit, match=f"one block does not run on the device with 8 x {LENGTH} tokens"):
                settle(asked, decoder, device, kernels)
    finally:
        kernels.close()
    assert seen == [[], [], [], [], [], [], []], "tries of 8, 4 and 2 rows, and of 8, 4, 2 and 1"
