"""A step whose state or saved inputs lie on disk is the sequential loop, bit for bit, whatever of it does."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from engine.toys import (
    EAGER,
    engine_on,
    on_disk,
    repeated,
    run_engine,
    run_sequential,
    toy_batch,
    toy_decoder,
    toy_options,
)
from slideformer.device.cpu import CpuDevice
from slideformer.engine.options import CONTENTS
from slideformer.memory import padded
from slideformer.schedule import Place
from slideformer.schedule.ops import STAGING

EVERY = [c for n in range(1, 5) for c in combinations(CONTENTS, n)]


def same_as_sequential(decoder, folder, *, micro_batches: int = 1, **changes) -> None:
    options = toy_options(micro_batches=micro_batches, offload_dir=str(folder), **changes)
    steps = repeated(toy_batch(micro_batches=micro_batches))
    expected = run_sequential(decoder, options, steps)
    with engine_on(decoder, options) as engine:
        found = run_engine(engine, steps)
        assert engine.folder.writes.nbytes > 0
    assert found == expected
    assert found.fall >= 0.5
    assert not folder.exists(), "a run takes away what it made"


@pytest.mark.parametrize("contents", EVERY, ids="+".join)
@pytest.mark.parametrize("program", [EAGER, {"max_grad_norm": 0.5}], ids=["eager", "deferred"])
def test_every_combination_of_contents_equals_the_sequential_loop(contents, program, tmp_path):
    decoder = toy_decoder(tied=len(contents) % 2 == 0)
    same_as_sequential(decoder, tmp_path / "disk", disk=on_disk(decoder, contents), **program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("ring", [1, 3])
def test_everything_on_disk_with_saved_inputs_and_micro_batches(dtype, tied, ring, tmp_path):
    decoder = toy_decoder(tied=tied, dtype=dtype)
    where = {"disk": on_disk(decoder), "saved_on_device": 0, "saved_on_disk": 3, "saved_over": 7, "disk_ring": ring}
    same_as_sequential(decoder, tmp_path / "disk", micro_batches=2, **where, **EAGER)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("dtype", "program"),
    [
        (torch.bfloat16, EAGER),
        (torch.bfloat16, {"max_grad_norm": 0.5}),
        (torch.bfloat16, {"sliced_head": True}),
        (torch.float32, EAGER),
    ],
    ids=["eager", "deferred", "sliced", "fp32"],
)
def test_weights_and_saved_inputs_that_go_straight_to_the_device_and_back(dtype, tied, program, tmp_path):
    """On the CPU the device's memory is the host's, so files are read and written there as anywhere."""
    decoder = toy_decoder(tied=tied, dtype=dtype)
    where = {"disk": on_disk(decoder), "saved_on_device": 0, "saved_on_disk": 3, "gds": True}
    same_as_sequential(decoder, tmp_path / "disk", micro_batches=2, **where, **program)


def test_what_goes_straight_takes_no_staging_and_what_does_not_still_does(tmp_path):
    decoder = toy_decoder(dtype=torch.bfloat16)
    where = {"disk": on_disk(decoder), "saved_on_disk": 99, "saved_on_device": 0, "disk_ring": 1, **EAGER}
    found = {}
    for gds in (False, True):
        options = toy_options(offload_dir=str(tmp_path / "disk"), gds=gds, **where)
        with engine_on(decoder, options) as engine:
            staged = [b for b in engine.executor.buffers if b.place in STAGING]
            found[gds] = {b.place for b in staged}, engine.budget.host_nbytes, engine.budget.device_nbytes
    (usual, host, device), (straight, host_then, device_then) = found[False], found[True]
    assert usual == STAGING and straight == {Place.STAGED_STATE, Place.STAGED_WEIGHTS}  # the table's rows are gathered
    assert host - host_then == 2 * padded(2 * 2 * 12 * decoder.hidden_size), "saved inputs: a place out, one back"
    assert device == device_then


@pytest.mark.parametrize("where", [{"late": (2, 3), **EAGER}, {"sliced_head": True}, {"ahead": (0, 1)}], ids=str)
def test_beside_what_else_a_step_can_do(where, tmp_path):
    decoder = toy_decoder()
    units = [u for u in range(len(decoder.layout.units)) if u not in where.get("ahead", ())]
    same_as_sequential(decoder, tmp_path / "disk", disk=on_disk(decoder, units=units), **where)


def test_state_on_disk_is_written_read_and_restored_bit_for_bit(tmp_path):
    decoder, steps = toy_decoder(), repeated(toy_batch(), 2)
    options = toy_options(disk=on_disk(decoder, units=[0, 2, 5]), offload_dir=str(tmp_path / "a"))
    with engine_on(decoder, toy_options()) as engine:
        first = run_engine(engine, steps)
        planes = {
            (u, p): engine.state.part(u, p, 0, engine.state.extent(u, p)[0]).clone()
            for u in range(len(decoder.layout.units))
            for p in CONTENTS
        }
        after = [r.loss for r in [engine.step(*steps[0][:1], lr=steps[0][1])]]
    with engine_on(decoder, options) as engine:
        for (unit, plane), values in planes.items():
            for start in range(0, len(values), 100):
                engine.restore(unit, plane, start, values[start : start + 100])
        engine.restore_num_updates(2)
        assert [r.loss for r in [engine.step(*steps[0][:1], lr=steps[0][1])]] == after
    assert first.fall > 0


def test_bytes_on_host_device_and_disk_are_those_of_the_budget(tmp_path):
    for index, units in enumerate([[0, 2], range(6)]):
        decoder = toy_decoder()
        options = toy_options(
            disk=on_disk(decoder, units=units),
            offload_dir=str(tmp_path / str(index)),
            saved_on_disk=99,
            saved_on_device=0,
            micro_batches=2,
        )
        with CpuDevice() as device, engine_on(decoder, options, device) as engine:
            assert engine.folder.nbytes == engine.budget.disk_nbytes
            assert engine.state.nbytes == engine.budget.state_nbytes
            assert device.peak_nbytes() == engine.budget.device_nbytes
            assert (engine.state.nbytes == 0) == (len(units) == 6)
