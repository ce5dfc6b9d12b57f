"""Closing, Ctrl-C, several engines: work that was queued is done or known to be lost, and nothing is left behind."""

from __future__ import annotations

import _thread
import gc
import os
import threading
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.toys import (
    EAGER,
    LR,
    HookedDevice,
    engine_on,
    repeated,
    run_sequential,
    state_hashes,
    tiny_batch,
    toy_options,
    write_weights,
)
from engine.trouble import (
    SETTINGS,
    STEP,
    Boom,
    decoder,
    doors,
    first_of_each_kind,
    plan_of,
)
from slideformer.device import LaneFailure
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Engine
from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.model.sampling import Sampling
from slideformer.schedule import OpKind


def test_closing_waits_for_what_is_queued():
    options = toy_options(**SETTINGS["deferred"])
    device = CpuDevice(jitter_s=2e-3, poison=True)
    with device:
        engine = Engine(decoder(), device, options)
        write_weights(engine.layout, engine)
        for _ in range(2):
            engine.step(tiny_batch(2), lr=LR)
        engine.close()
        found = state_hashes(engine)
        engine.close()
        for use in doors(engine)[:2]:
            with pytest.raises(RunFailed, match="the engine is closed"):
                use()
    engine.close()
    assert found == run_sequential(decoder(), options, [(tiny_batch(2), LR)] * 2).state


@pytest.mark.parametrize("program", SETTINGS)
def test_a_closed_engine_gives_back_its_buffers_whoever_keeps_it_or_its_results(program):
    """At once: Python's collector of cycles is off."""
    options = toy_options(**SETTINGS[program])
    gc.disable()
    try:
        with CpuDevice() as device:
            with Engine(decoder(), device, options) as engine:
                write_weights(engine.layout, engine)
                results = [engine.step(tiny_batch(2), lr=LR) for _ in range(2)]
                engine.generate([[5, 6, 7]], Sampling(max_new_tokens=2))
                held = [*engine.executor.buffers.values(), *engine._generation.executor.buffers.values()]
                state = [plane for unit in range(4) for plane in engine.state.planes(unit)]
                kept = {tensor.untyped_storage().data_ptr() for tensor in state}
                storages = [one.untyped_storage() for one in held if isinstance(one, torch.Tensor)]
                refs = [StorageWeakRef(one) for one in storages if one.data_ptr() not in kept]
                assert len(refs) > 20
                del held, state, storages
            assert all(ref.expired() for ref in refs)
            assert all(0 < result.loss < 10 and result.timeline().end_s > 0 for result in results)
            values = torch.zeros(4)
            for use in (
                *doors(engine)[:2],
                lambda: engine.generate([[5]], Sampling(max_new_tokens=1)),
                lambda: engine.read(1, 0, 4),
                lambda: engine.write(1, 0, values),
                lambda: engine.restore(1, "exp_avg", 0, values),
            ):
                with pytest.raises(RunFailed, match="the engine is closed"):
                    use()
    finally:
        gc.enable()


def test_a_failure_that_nobody_has_heard_of_is_raised_by_close_and_only_there():
    def before(number: int) -> None:
        if number == 3:
            raise Boom

    with HookedDevice(before=before) as device:
        with pytest.raises(LaneFailure), Engine(decoder(), device, toy_options(**SETTINGS["eager"])) as engine:
            engine.step(tiny_batch(2), lr=LR)
            time.sleep(0.3)
        engine.close()
    with HookedDevice(before=before) as device, Engine(decoder(), device, toy_options(**SETTINGS["eager"])) as engine:
        with pytest.raises(LaneFailure):
            engine.step(tiny_batch(2), lr=LR).wait()


def test_closing_after_a_failure_waits_for_the_update_that_is_still_at_work():
    """Its native threads must not be ended under it."""
    plan = plan_of("eager", STEP)
    kinds = first_of_each_kind(plan)
    updating, done = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == kinds[OpKind.UPDATE]:
            updating.set()
            time.sleep(0.5)
        if number == kinds[OpKind.EMBED_BACKWARD]:
            updating.wait(5)
            raise Boom

    def after(number: int) -> None:
        if number == kinds[OpKind.UPDATE]:
            done.set()

    with HookedDevice(before=before, after=after) as device:
        engine = Engine(decoder(), device, toy_options(**SETTINGS["eager"]))
        write_weights(engine.layout, engine)
        with pytest.raises(LaneFailure):
            engine.step(tiny_batch(2), lr=LR).wait()
        assert not done.is_set()
        engine.close()
        assert done.is_set()


def test_reading_after_a_failure_waits_for_the_update_that_is_still_at_work():
    """The update has not begun to write when the other lane fails; that it did is known when it is done."""
    plan = plan_of("eager", STEP)
    kinds = first_of_each_kind(plan)
    updating = threading.Event()

    def before(number: int) -> None:
        if number == kinds[OpKind.UPDATE]:
            updating.set()
            time.sleep(0.5)
        if number == kinds[OpKind.EMBED_BACKWARD]:
            updating.wait(5)
            raise Boom

    with engine_on(decoder(), toy_options(**SETTINGS["eager"]), HookedDevice(before=before)) as engine:
        write_weights(engine.layout, engine)
        with pytest.raises(LaneFailure):
            engine.step(tiny_batch(2), lr=LR).wait()
        with pytest.raises(RunFailed, match="torn"):
            engine.read(0, 0, 4)


@pytest.mark.parametrize("kind", [OpKind.COMPLETE, OpKind.COMPLETE_ROWS], ids=str)
def test_new_weights_without_the_rest_of_the_new_state_are_torn(kind):
    first = first_of_each_kind(plan_of("ahead, clipped", STEP))[kind]

    def before(number: int) -> None:
        if number == first:
            raise Boom

    settings = toy_options(**SETTINGS["ahead, clipped"])
    with engine_on(decoder(), settings, HookedDevice(before=before)) as engine:
        write_weights(engine.layout, engine)
        with pytest.raises(LaneFailure):
            engine.step(tiny_batch(2), lr=LR).wait()
        with pytest.raises(RunFailed, match="torn"):
            engine.read(0, 0, 4)


def test_a_device_closed_too_early_is_an_error_not_a_hang():
    device = CpuDevice()
    engine = Engine(decoder(), device, toy_options(**SETTINGS["eager"]))
    write_weights(engine.layout, engine)
    engine.step(tiny_batch(2), lr=LR)
    device.close()
    with pytest.raises(RunFailed, match="after its device was closed"):
        engine.step(tiny_batch(2), lr=LR)
    engine.close()


# Ctrl-C


@pytest.mark.parametrize("program", SETTINGS)
@pytest.mark.parametrize("where", ["first op", "before the first update", "after the first update", "last op"])
def test_a_step_interrupted_while_it_is_submitted_is_never_taken_for_whole(program, where):
    plan = plan_of(program, STEP)
    writers = (OpKind.UPDATE, OpKind.UPDATE_TABLE, OpKind.UPDATE_REST, OpKind.SETTLE, OpKind.SETTLE_ROWS)
    writers += (OpKind.UPDATE_RESIDENT, OpKind.UPDATE_RESIDENT_TABLE)
    first_update = next(i for i, op in enumerate(plan.ops) if op.kind in writers)
    index = {
        "first op": 0,
        "before the first update": first_update,
        "after the first update": first_update + 1,
        "last op": len(plan.ops) - 1,
    }[where]

    def on_queue(number: int) -> None:
        if number == len(plan.ops) + index:
            raise KeyboardInterrupt

    options = toy_options(**SETTINGS[program])
    with engine_on(decoder(), options, HookedDevice(on_queue=on_queue, poison=True)) as engine:
        write_weights(engine.layout, engine)
        first = engine.step(tiny_batch(2), lr=LR)
        with pytest.raises(KeyboardInterrupt):
            engine.step(tiny_batch(2), lr=LR)
        expected = run_sequential(decoder(), options, [(tiny_batch(2), LR)])
        assert (first.loss, first.grad_norm) == (expected.losses[0], expected.norms[0])
        for use in (
            lambda: engine.step(tiny_batch(2), lr=LR),
            lambda: engine.evaluate(tiny_batch(2)),
            engine.synchronize,
        ):
            with pytest.raises(RunFailed, match="interrupted while it was submitted"):
                use()
        if index <= first_update:
            engine.read(0, 0, 4)
            assert state_hashes(engine) == expected.state
        else:
            with pytest.raises(RunFailed, match="torn"):
                engine.read(0, 0, 4)


def test_a_caller_interrupted_while_it_waits_can_go_on():
    plan = plan_of("deferred", STEP)
    index = first_of_each_kind(plan)[OpKind.DECIDE]

    def before(number: int) -> None:
        if number == index:
            time.sleep(0.2)
            _thread.interrupt_main()
            time.sleep(0.2)

    options, steps = toy_options(**SETTINGS["deferred"]), repeated(tiny_batch(2), 3)
    with engine_on(decoder(), options, HookedDevice(before=before)) as engine:
        write_weights(engine.layout, engine)
        first = engine.step(*steps[0][:1], lr=steps[0][1])
        with pytest.raises(KeyboardInterrupt):
            _ = first.loss
        results = [first, *(engine.step(batch, lr=lr) for batch, lr in steps[1:])]
        losses = tuple(r.loss for r in results)
        engine.synchronize()
        expected = run_sequential(decoder(), options, steps)
        assert losses == expected.losses
        assert state_hashes(engine) == expected.state


# several engines, many engines


@pytest.mark.parametrize("devices", [1, 2])
def test_two_engines_in_one_process_do_not_meet(devices):
    options = [toy_options(**SETTINGS[program]) for program in ("eager", "deferred")]
    steps = repeated(tiny_batch(2), 3)
    opened = [CpuDevice(jitter_s=5e-4, poison=True, seed=i) for i in range(devices)]
    engines = [Engine(decoder(), opened[i % devices], o) for i, o in enumerate(options)]
    for engine in engines:
        write_weights(engine.layout, engine)
    for batch, lr in steps:
        for engine in engines:
            engine.step(batch, lr=lr)
    for engine, option in zip(engines, options, strict=True):
        engine.synchronize()
        assert state_hashes(engine) == run_sequential(decoder(), option, steps).state
        engine.close()
    for device in opened:
        device.close()


def test_a_failure_of_one_engine_leaves_another_device_alone():
    def before(number: int) -> None:
        if number == 3:
            raise Boom

    options, steps = toy_options(**SETTINGS["deferred"]), repeated(tiny_batch(2), 3)
    with engine_on(decoder(), options) as good:
        write_weights(good.layout, good)
        with engine_on(decoder(), options, HookedDevice(before=before)) as bad:
            for batch, lr in steps:
                good.step(batch, lr=lr)
                with pytest.raises(LaneFailure):
                    bad.step(batch, lr=lr).wait()
        good.synchronize()
        assert state_hashes(good) == run_sequential(decoder(), options, steps).state


def test_engines_that_are_closed_or_never_built_leave_no_threads_and_no_memory():
    """Native threads are seen by the kernel alone."""

    def once() -> None:
        with engine_on(decoder(), toy_options(**EAGER), CpuDevice()) as engine:
            engine.step(tiny_batch(), lr=LR).wait()
            with pytest.raises(DoesNotFit):
                Engine(decoder(), engine.device, toy_options(**EAGER, max_host_memory=1))
            with pytest.raises(BadInput):
                Engine(decoder(), engine.device, toy_options(**EAGER, window=0))

    def used() -> tuple[int, int]:
        gc.collect()
        mappings = open("/proc/self/smaps_rollup").read().split()
        return len(os.listdir("/proc/self/task")), int(mappings[mappings.index("Rss:") + 1])

    for _ in range(3):
        once()
    threads, resident_kib = used()
    for _ in range(8):
        once()
    threads_after, resident_after_kib = used()
    assert threads_after <= threads
    assert resident_after_kib - resident_kib < 4096
    assert torch.is_grad_enabled()
