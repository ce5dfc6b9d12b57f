"""Units whose state is on the device, with and without a second run of their blocks, change nothing but bytes."""

from __future__ import annotations

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    engine_on,
    reference,
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
from slideformer.device import LaneFailure
from slideformer.device.cpu import CpuDevice
from slideformer.errors import RunFailed
from slideformer.schedule import LaneName, Place

BLOCKS = (
    1,
    2,
    3,
    4,
)  # of the toys without a glue; unit 0 is the table, 5 the final norm, 6 an untied output projection


@pytest.mark.parametrize("program", [EAGER, DEFERRED], ids=["eager", "deferred"])
@pytest.mark.parametrize(
    ("family", "tied", "resident", "keep", "micro_batches", "dtype"),
    [
        ("llama", True, (0,), (), 1, torch.bfloat16),
        ("llama", False, (0,), (), 2, torch.float32),
        ("llama", False, (6,), (), 1, torch.bfloat16),
        ("llama", True, (1, 2), (), 2, torch.bfloat16),
        ("llama", True, (2, 4), (2, 4), 1, torch.float32),
        ("llama", True, (0, *BLOCKS, 5), (), 1, torch.float32),
        ("llama", False, (0, *BLOCKS, 5, 6), BLOCKS, 2, torch.bfloat16),
        ("gemma2", True, (0, *BLOCKS, 5), (1, 3), 2, torch.float32),
        ("qwen3", False, (0, 3, 5, 6), (3,), 1, torch.bfloat16),
        ("gpt2", True, (0, 1, 2, 3), (2, 3), 2, torch.bfloat16),
    ],
    ids=str,
)
def test_five_steps_equal_the_sequential_loop_bit_for_bit(family, tied, resident, keep, micro_batches, dtype, program):
    options = toy_options(micro_batches=micro_batches, resident=resident, keep=keep, window=2, **program)
    decoder = toy_decoder(family, tied=tied, dtype=dtype)
    expected = reference(family, tied, dtype, micro_batches, options.max_grad_norm)
    with engine_on(decoder, options, CpuDevice(jitter_s=5e-4, poison=True)) as engine:
        found = run_engine(engine, repeated(toy_batch(micro_batches)))
    assert expected.fall >= 0.5
    assert found == expected


def test_updates_ahead_and_spilled_inputs_go_with_resident_units():
    decoder = toy_decoder(tied=True, dtype=torch.bfloat16)
    options = toy_options(
        max_grad_norm=2.5, micro_batches=2, ahead=(0, 1, 2), resident=(2, 4), keep=(4,), saved_on_device=1
    )
    steps = repeated(toy_batch(2))
    expected = run_sequential(toy_decoder(dtype=torch.bfloat16), options, steps)
    assert min(expected.norms) < 2.5 < max(expected.norms)
    with engine_on(decoder, options) as engine:
        assert engine.step_options.ahead == (0, 1)
        assert run_engine(engine, steps) == expected


@pytest.mark.parametrize("frozen", [("mlp",), ("embed_tokens",), (r"layers\.[01]\.", "embed_tokens")], ids=str)
def test_frozen_parameters_of_resident_units_stay_as_they_are(frozen):
    decoder = toy_decoder(tied=False, frozen=frozen)
    options = toy_options(max_grad_norm=0.5, resident=(0, 1, 2, 4), keep=(1, 2))
    expected = reference("llama", False, torch.float32, 1, 0.5, frozen)
    with engine_on(decoder, options) as engine:
        assert run_engine(engine, repeated(toy_batch())) == expected


def test_with_everything_resident_nothing_but_norms_and_the_loss_crosses_the_link():
    decoder = tiny_decoder()
    every = tuple(range(len(decoder.layout.units)))
    with engine_on(decoder, toy_options(resident=every)) as engine:
        assert not {b.place for b in engine.plan.buffers()} & {Place.SLOT, Place.WEIGHT, Place.RING, Place.GRAD_HOST}
        assert [str(op) for op in engine.plan.ops if op.lane is LaneName.UPLOAD] == ["load"]
        assert engine.state.nbytes == 0 and engine.budget.state_nbytes == 0
        nbytes, rounding = 16 * decoder.layout.numel, 5 * 512 * len(every)  # 12, and the master joined
        assert nbytes <= engine.budget.device["resident state"] < nbytes + rounding


def test_device_bytes_are_those_of_the_budget():
    for dtype in (torch.float32, torch.bfloat16):
        options = toy_options(micro_batches=2, resident=(0, 2, 3), keep=(3,))
        with (
            CpuDevice() as device,
            engine_on(toy_decoder(dtype=dtype), options, device) as engine,
        ):
            assert device.peak_nbytes() == engine.budget.device_nbytes


def test_state_of_resident_units_is_written_read_and_restored_bit_for_bit():
    options = toy_options(resident=(0, 2, 5), max_grad_norm=0.5)
    batch = toy_batch()
    with engine_on(toy_decoder(), options) as engine:
        run_engine(engine, repeated(batch, 2))
        kept = [engine.settled_state().planes(u) for u in range(len(engine.layout.units))]
        kept = [type(p)(*(t.clone() for t in p)) for p in kept]
        hashes = state_hashes(engine)
        masters = [engine.read(u, 3, unit.numel - 2) for u, unit in enumerate(engine.layout.units)]
        after = [engine.step(batch, lr=1e-2).loss for _ in range(2)]
        engine.synchronize()
        finished = state_hashes(engine)
        for unit, planes in enumerate(kept):
            for name in planes._fields:
                values = getattr(planes, name)
                engine.restore(unit, name, 0, values[: values.numel() // 2])
                engine.restore(unit, name, values.numel() // 2, values[values.numel() // 2 :])
        engine.restore_num_updates(2)
        assert state_hashes(engine) == hashes
        for unit, master in enumerate(masters):
            assert torch.equal(engine.read(unit, 3, engine.layout.units[unit].numel - 2), master)
        assert [engine.step(batch, lr=1e-2).loss for _ in range(2)] == after
        engine.synchronize()
        assert state_hashes(engine) == finished


def test_an_evaluation_between_steps_sees_what_was_updated_and_changes_nothing():
    batch = tiny_batch()
    losses = {}
    for resident in ((), (0, 1, 2, 3, 4)):
        with engine_on(tiny_decoder(), toy_options(resident=resident, keep=resident[1:3])) as engine:
            write_weights(engine.layout, engine)
            found = []
            for _ in range(3):
                engine.step(batch, lr=1e-2).wait()
                before = engine.evaluate(batch)
                hashes = state_hashes(engine)
                found.append(before)
                assert engine.evaluate(batch) == before and state_hashes(engine) == hashes
            losses[resident] = found
    first, second = losses.values()
    assert first == second and first[0] != first[1]


def test_a_gradient_that_is_not_finite_reaches_no_weight_of_a_deferred_step():
    decoder = tiny_decoder()
    every = tuple(range(len(decoder.layout.units)))
    options = toy_options(resident=every, keep=(1, 2), on_nonfinite="skip")
    with engine_on(decoder, options) as engine:
        write_weights(engine.layout, engine)
        engine.step(tiny_batch(), lr=1e-2).wait()
        good = engine.read(2, 0, 1)
        engine.write(2, 0, torch.tensor([float("nan")]))
        before = state_hashes(engine)
        assert engine.step(tiny_batch(), lr=1e-2).nonfinite
        assert state_hashes(engine) == before
        engine.write(2, 0, good)
        assert not engine.step(tiny_batch(), lr=1e-2).nonfinite


def test_an_eager_step_with_a_gradient_that_is_not_finite_stops_and_leaves_a_torn_state(monkeypatch):
    decoder = tiny_decoder()
    every = tuple(range(len(decoder.layout.units)))
    with engine_on(decoder, toy_options(resident=every, **EAGER)) as engine:
        write_weights(engine.layout, engine)
        engine.step(tiny_batch(), lr=1e-2).wait()
        inner = decoder.rerun

        def broken(unit, params, hidden, call):
            out = inner(unit, params, hidden, call)
            if unit == 2:
                out.register_hook(lambda grad: grad * float("inf"))
            return out

        monkeypatch.setattr(decoder, "rerun", broken)
        with pytest.raises(LaneFailure, match="cannot be taken back"):
            engine.step(tiny_batch(), lr=1e-2).wait()
            engine.synchronize()
        with pytest.raises(RunFailed, match="torn"):
            engine.read(0, 0, 1)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("late", [(2, 4), (1, 2, 3, 4)], ids=str)
def test_late_updates_equal_the_sequential_loop_bit_for_bit(late, dtype, micro_batches):
    options = toy_options(micro_batches=micro_batches, late=late, ring=2, grad_slots=1, **EAGER)
    expected = reference("llama", True, dtype, micro_batches, 0.0)
    with engine_on(toy_decoder(dtype=dtype), options, CpuDevice(jitter_s=1e-3, poison=True)) as engine:
        assert run_engine(engine, repeated(toy_batch(micro_batches))) == expected
        order = [op.unit for op in engine.plan.ops if op.lane is LaneName.UPDATE and op.unit in BLOCKS]
        first = [u for u in BLOCKS if u not in late]
        assert list(dict.fromkeys(order)) == [*reversed(first), *late]
