"""Updates ahead of the verdict, into a second copy of the state, change nothing whatever the norm turns out to be."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.toys import (
    LR,
    TINY_VOCAB,
    Outcome,
    engine_on,
    on_disk,
    repeated,
    run_engine,
    run_sequential,
    state_hashes,
    tiny_batch,
    tiny_decoder,
    toy_batch,
    toy_decoder,
    toy_options,
    write_weights,
)
from slideformer.device.cpu import CpuDevice
from slideformer.engine import EngineOptions
from slideformer.engine.ahead import fastest_ahead, units_ahead
from slideformer.engine.costs import ASSUMED, BlockCost, Costs, HeadCost, predicted_s
from slideformer.engine.host_actions import HostActions
from slideformer.engine.updates import Updates
from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.memory import BatchShape
from slideformer.schedule import build_step, choose_ahead

CLIP = 2.5
"""Between the norms of the toys' steps: the first steps are clipped, later ones are not."""


@pytest.fixture
def settled(monkeypatch):
    """What every settled tile did: whether the spare copy became the state."""
    found: list[bool] = []
    holds = Updates._holds
    monkeypatch.setattr(Updates, "_holds", lambda *args: found.append(holds(*args)) or found[-1])
    return found


@pytest.mark.parametrize(
    ("ahead", "tied", "micro_batches", "dtype"),
    [
        ((0,), True, 1, torch.float32),
        ((0,), False, 2, torch.bfloat16),
        ((1, 2), True, 2, torch.bfloat16),
        ((1, 2), False, 1, torch.float32),
        ((0, 1, 2, 3, 4, 5), True, 2, torch.float32),
        ((0, 1, 2, 3, 4, 5), False, 1, torch.bfloat16),
        ((0, 2, 5), True, 1, torch.bfloat16),
        ((0, 2, 6), False, 2, torch.float32),
    ],
    ids=str,
)
def test_clipped_and_unclipped_steps_equal_the_sequential_loop(tied, ahead, micro_batches, dtype, settled):
    decoder = toy_decoder(tied=tied, dtype=dtype)
    options = toy_options(micro_batches=micro_batches, max_grad_norm=CLIP, ahead=ahead)
    steps = repeated(toy_batch(micro_batches), steps=10)
    expected = run_sequential(decoder, options, steps)
    assert max(expected.norms) > CLIP
    assert any(max(pair) < CLIP for pair in pairwise(expected.norms))  # after a clipped step nothing is tried
    with engine_on(decoder, options, CpuDevice(jitter_s=1e-3, poison=True)) as engine:
        assert run_engine(engine, steps) == expected
    assert True in settled and False in settled


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_nothing_is_tried_ahead_after_a_clipped_step(clip, monkeypatch):
    tried: list[bool] = []
    hopeful = Updates._hopeful
    monkeypatch.setattr(Updates, "_hopeful", lambda *args: tried.append(hopeful(*args)) or tried[-1])
    decoder = toy_decoder(tied=False)
    options = toy_options(max_grad_norm=clip, ahead=(1, 2))
    steps = repeated(toy_batch(1), steps=3)
    with engine_on(decoder, options, CpuDevice()) as engine:
        assert run_engine(engine, steps) == run_sequential(decoder, options, steps)
    after_the_first = tried[len(tried) // 3 :]
    assert after_the_first and set(after_the_first) == {clip == 100.0}


PATIENCE_S = 20.0


@pytest.fixture
def in_two(monkeypatch):
    """Holds an op that settles rows of the table until the next batch is known, and one that settles the others until
    the next batch's rows are gathered. How many rows each of the latter had left; the last step knows of no next."""
    gathered, left, last = threading.Condition(), [], []
    gather, others, read_next = HostActions.gather, Updates.settle_others, Updates._read_next
    done: dict[int, int] = {}

    def counting(self, reach, run, op):
        gather(self, reach, run, op)
        with gathered:
            done[id(run.feed)] = done.get(id(run.feed), 0) + 1
            gathered.notify_all()

    def knowing(self, run, op):
        with gathered:
            assert gathered.wait_for(lambda: run.next_feed is not None or last == [id(run)], PATIENCE_S)
        return read_next(self, run, op)

    def behind(self, reach, run, op):
        tiles = len(self.layout.tiles(op.unit))
        with gathered:
            waits = run.next_feed is not None
            assert not waits or gathered.wait_for(lambda: done.get(id(run.next_feed)) == tiles, PATIENCE_S)
        rows = reach.cell("other_rows").value
        left.append(0 if rows is None else int(rows.sum()))
        others(self, reach, run, op)

    for owner, name, action in (
        (HostActions, "gather", counting),
        (Updates, "_read_next", knowing),
        (Updates, "settle_others", behind),
    ):
        monkeypatch.setattr(owner, name, action)

    def submit(engine, steps):
        write_weights(engine.layout, engine)
        results = []
        for index, (batch, lr) in enumerate(steps):
            results.append(engine.step(batch, lr=lr))
            with gathered:
                last[:] = [id(results[-1]._run)] if index == len(steps) - 1 else []
                gathered.notify_all()
        engine.synchronize()
        return Outcome(*zip(*((r.loss, r.grad_norm) for r in results), strict=True), state_hashes(engine)), left

    return submit


@pytest.mark.parametrize("clip", [0.5, 100.0], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sliced", [False, True], ids=["", "sliced head"])
def test_the_next_batch_is_gathered_before_other_rows_of_the_table_are_settled(sliced, tied, dtype, clip, in_two):
    decoder = tiny_decoder(tied=tied, dtype=dtype)
    options = toy_options(max_grad_norm=clip, ahead=(0, 1), sliced_head=sliced)
    steps = [(tiny_batch(seed=seed), LR) for seed in range(5)]
    expected = run_sequential(decoder, options, steps)
    with engine_on(decoder, options) as engine:
        found, left = in_two(engine, steps)
    assert found == expected
    tiles = len(decoder.layout.tiles(0))
    assert tiles > 2 and len(left) == 5 * tiles and sum(left[-tiles:]) == 0
    in_two = [sum(left[step * tiles :][:tiles]) for step in range(4)]
    assert min(in_two) > TINY_VOCAB // 4 if clip == 100.0 else max(in_two) == 0


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sliced", [False, True], ids=["", "sliced head"])
def test_nobody_reads_a_row_that_is_left_before_it_is_settled(sliced, tied, monkeypatch):
    settle_rows, left = Updates.settle_rows, []

    def poisoned(self, reach, run, op):
        settle_rows(self, reach, run, op)
        rows, (touched, _, _) = reach.cell("other_rows").value, run.feed.rows_by_tile[op.tile]
        if rows is not None:
            stale = touched[rows[touched]]
            weight = reach.twin("spare").current.weight[: self.layout.tiles(op.unit)[op.tile].numel]
            weight.view(len(rows), -1)[stale] = float("nan")
            left.append(len(stale))

    monkeypatch.setattr(Updates, "settle_rows", poisoned)
    decoder = tiny_decoder(tied=tied, dtype=torch.bfloat16)
    options = toy_options(max_grad_norm=100.0, ahead=(0, 1), sliced_head=sliced)
    steps = [(tiny_batch(seed=seed), LR) for seed in range(5)]
    with engine_on(decoder, options, CpuDevice(jitter_s=1e-3)) as engine:
        write_weights(engine.layout, engine)
        results = [engine.step(batch, lr=lr) for batch, lr in steps]
        found = [(result.loss, result.grad_norm) for result in results]
        engine.synchronize()
        found = Outcome(*zip(*found, strict=True), state_hashes(engine))
    assert sum(left) > 0
    assert found == run_sequential(decoder, options, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sliced", [False, True], ids=["", "sliced head"])
def test_every_step_clipped_beside_resident_units_and_others_on_disk(tied, dtype, sliced, tmp_path, settled):
    decoder = toy_decoder(tied=tied, dtype=dtype)
    last = len(decoder.layout.units) - 1
    options = toy_options(
        micro_batches=2,
        max_grad_norm=0.5,
        ahead=(0, 1, last),
        resident=(2,),
        disk=on_disk(decoder, units=(3,)),
        saved_on_device=0,
        saved_on_disk=3,
        sliced_head=sliced,
        offload_dir=str(tmp_path / "disk"),
    )
    steps = repeated(toy_batch(2))
    expected = run_sequential(decoder, options, steps)
    assert min(expected.norms) > 0.5
    with engine_on(decoder, options, CpuDevice(jitter_s=1e-3, poison=True)) as engine:
        assert run_engine(engine, steps) == expected
    assert set(settled) == {False}


def test_a_batch_that_was_not_submitted_after_all_is_not_the_next_one(monkeypatch):
    """Rows are settled for the batch that follows; after an error before it does, that may be another."""
    decoder, options = tiny_decoder(), toy_options(max_grad_norm=0.5, ahead=(0, 1))
    steps = [(tiny_batch(seed=seed), LR) for seed in (0, 2)]
    expected = run_sequential(decoder, options, steps)
    with engine_on(decoder, options) as engine:
        write_weights(engine.layout, engine)
        first = engine.step(steps[0][0], lr=LR)
        with monkeypatch.context() as once:
            once.setattr(engine.device, "anchor", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.step(tiny_batch(seed=1), lr=LR)
        assert first._run.next_feed is None
        second = engine.step(steps[1][0], lr=LR)
        found = [(r.loss, r.grad_norm) for r in (first, second)]
        engine.synchronize()
        assert Outcome(*zip(*found, strict=True), state_hashes(engine)) == expected


def test_after_a_step_both_halves_of_a_settled_tile_are_in_one_copy():
    """Weights are uploaded from the copy that its moments go to, whatever the step was."""
    decoder = toy_decoder(dtype=torch.bfloat16)
    options = toy_options(max_grad_norm=CLIP, ahead=(0, 1, 2))
    with engine_on(decoder, options) as engine:
        run_engine(engine, repeated(toy_batch())[:1])
        swapped = {twin.index for twin in engine.state.twins.values()}
        assert swapped == {1}, "a clipped step settles in the other copy too"


def test_a_frozen_end_of_a_unit_is_in_both_copies():
    frozen = ("mlp",)
    decoder = toy_decoder(frozen=frozen)
    options = toy_options(max_grad_norm=CLIP, ahead=(0, 1, 2, 3))
    steps = repeated(toy_batch())
    expected = run_sequential(toy_decoder(frozen=frozen), options, steps)
    with engine_on(decoder, options) as engine:
        assert run_engine(engine, steps) == expected
        for unit in range(len(decoder.layout.units)):
            whole = engine.read(unit, 0, decoder.layout.units[unit].numel)
            assert torch.isfinite(whole).all()


def test_a_step_that_is_skipped_swaps_nothing(settled):
    """A weight that is not a number for one step, then put back: all goes on as if that step had never been."""
    decoder = toy_decoder()
    options = toy_options(max_grad_norm=CLIP, ahead=(0, 1, 2, 3, 4), on_nonfinite="skip")
    steps = repeated(toy_batch(), 4)
    expected = run_sequential(decoder, options, steps)
    final = len(decoder.layout.units) - 1
    with engine_on(decoder, options) as engine:
        first = run_engine(engine, steps[:2])
        good = engine.read(final, 0, 1)
        num_settled = len(settled)
        engine.write(final, 0, torch.tensor([float("nan")]))
        assert engine.step(steps[2][0], lr=1.0).nonfinite
        engine.write(final, 0, good)
        assert state_hashes(engine) == first.state
        assert len(settled) == num_settled
        for batch, lr in steps[2:]:
            engine.step(batch, lr=lr).wait()
        assert state_hashes(engine) == expected.state


def chosen(share: float, spare_nbytes: int = 10**12, **changes):
    """Of 12 blocks of 100 M parameters and a tied table, with a share of 32 x 1024 tokens a step: the units that the
    clock chooses, those that sizes alone do, and the time of a step with some, clipped or not."""
    blocks = [Unit(f"b{b}", UnitKind.BLOCK, (Param(f"w{b}", (100_000_000,)),)) for b in range(12)]
    table = Unit("table", UnitKind.TABLE, (Param("table", (60_000, 3072)),))
    layout = Layout((table, *blocks), 32 << 20, tied=True)
    options = toy_options(**{"max_grad_norm": 1.0, "saved_on_device": None, **changes})
    shape = BatchShape(1, 32, 1024, 3072, torch.bfloat16)
    times = [share * seconds for seconds in (0.0105, 0.032, 0.0105, 0.0215)]
    rates = replace(ASSUMED["cuda"], update_numel=5.48e9)
    head = HeadCost(share * 0.06, 0.0, 0)
    costs = Costs(rates, (BlockCost(*times, 0, 0, 0),) * 12, head, head, measured=False)

    def step_s(options: EngineOptions, clipped: bool) -> float:
        plan = build_step(layout, options.step_options(layout, torch.bfloat16))
        return predicted_s(plan, layout, shape, costs, clipped=clipped)

    def times_with(units: tuple[int, ...]) -> list[float]:
        return [step_s(replace(options, ahead=units), clipped) for clipped in (False, True)]

    found = fastest_ahead(layout, options, spare_nbytes, costs, step_s)
    assert sum(layout.units[u].numel for u in found) * 12 <= max(spare_nbytes, 0)
    return found, units_ahead(layout, options, spare_nbytes, costs), times_with


def test_where_steps_are_long_more_units_make_clipped_ones_shorter():
    found, least, times = chosen(1.0)
    assert found == tuple(range(len(found))) and len(found) > len(least)
    (unclipped, clipped), (before, clipped_before) = times(found), times(least)
    assert unclipped <= 1.005 * before and clipped < 0.97 * clipped_before
    assert clipped < 1.08 * unclipped


def test_where_the_update_sets_the_pace_few_units_are_updated_twice():
    found, least, times = chosen(0.125)
    assert 0 < len(found) < len(least)
    assert sum(times(found)) < 0.9 * sum(times(least)) and sum(times(found)) < 0.97 * sum(times(()))


def test_without_clipping_no_more_than_a_forward_cannot_hide_and_with_little_memory_what_has_room():
    found, least, times = chosen(1.0, max_grad_norm=0.0)
    assert len(found) <= len(least) and times(found)[0] <= 1.005 * times(least)[0]
    assert chosen(1.0, spare_nbytes=6 * 10**9)[0] == (0, 1, 2)
    assert chosen(1.0, spare_nbytes=-1)[0] == () == chosen(1.0, update="eager", max_grad_norm=0.0)[0]


def test_the_first_units_are_chosen_and_no_more_than_there_is_room_for():
    layout = toy_decoder().layout
    assert choose_ahead(layout, update_per_forward=1e-6, room_numel=10**9) == ()
    slow = choose_ahead(layout, update_per_forward=2.0, room_numel=10**9)
    assert slow == tuple(range(len(slow))) and 1 < len(slow) < len(layout.units)
    assert choose_ahead(layout, update_per_forward=1e6, room_numel=10**9) == tuple(range(len(layout.units)))
    short = choose_ahead(layout, update_per_forward=1e6, room_numel=layout.units[0].numel + 1)
    assert short == (0,)
