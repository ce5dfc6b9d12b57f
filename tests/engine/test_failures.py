"""Whatever fails, and wherever: the caller hears of it within a second, nothing hangs, and all threads end."""

from __future__ import annotations

import _thread
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    HookedDevice,
    engine_on,
    repeated,
    run_sequential,
    state_hashes,
    tiny_batch,
    tiny_decoder,
    toy_options,
    write_weights,
)
from slideformer.device import LaneFailure
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Engine
from slideformer.engine.fit import plans_of
from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.schedule import LaneName, OpKind, Plan

SPILLING = {"saved_on_device": 1, "hidden_ring": 2, "micro_batches": 2}
SETTINGS = {
    "eager": {**EAGER, **SPILLING},
    "deferred": {**DEFERRED, **SPILLING},
    "ahead": {**DEFERRED, **SPILLING, "max_grad_norm": 100.0, "ahead": (0, 1, 2)},
}
STEP, EVALUATION = 0, 1


class Boom(Exception):
    pass


def decoder():
    return tiny_decoder(blocks=2, tile=300)


def plan_of(program: str, which: int) -> Plan:
    options, model = toy_options(**SETTINGS[program]), decoder()
    return plans_of(model.layout, options, model.dtype)[which]


def first_of_each_kind(plan: Plan) -> dict[OpKind, int]:
    return {op.kind: i for i, op in reversed(list(enumerate(plan.ops)))}


def training_kinds() -> list[tuple[str, OpKind]]:
    """Each kind in the first program that has it."""
    found = {kind: name for name in reversed(SETTINGS) for kind in first_of_each_kind(plan_of(name, STEP))}
    return [(name, kind) for kind, name in found.items()]


TRAINING = training_kinds()


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("slideformer")]
    assert left == [], "threads that nobody joined"


def doors(engine: Engine) -> list[Callable[[], object]]:
    return [lambda: engine.step(tiny_batch(2), lr=LR), lambda: engine.evaluate(tiny_batch(2)), engine.synchronize]


def assert_dead(engine: Engine, failure: LaneFailure) -> None:
    """Every door says what happened, again and again, and none hangs."""
    for _ in range(2):
        for use in (
            lambda: engine.step(tiny_batch(2), lr=LR),
            lambda: engine.evaluate(tiny_batch(2)),
            engine.synchronize,
        ):
            with pytest.raises(LaneFailure) as again:
                use()
            assert again.value is failure


@pytest.mark.parametrize(("program", "kind"), TRAINING, ids=lambda v: str(v))
def test_an_exception_in_any_op_is_raised_in_the_caller_within_a_second(program, kind):
    plan = plan_of(program, STEP)
    index = first_of_each_kind(plan)[kind]
    op, raised_s = plan.ops[index], []

    def before(number: int) -> None:
        if number == len(plan.ops) + index:  # in the second step, while the third is queued
            raised_s.append(time.perf_counter())
            raise Boom("it broke")

    device = HookedDevice(before=before)
    with engine_on(decoder(), toy_options(**SETTINGS[program]), device) as engine:
        write_weights(engine.layout, engine)
        with pytest.raises(LaneFailure) as caught:
            for result in [engine.step(tiny_batch(2), lr=LR) for _ in range(3)]:
                result.wait()
        assert time.perf_counter() - raised_s[0] < 1.0
        failure = caught.value
        assert (failure.lane, failure.label) == (op.lane, str(op))
        assert isinstance(failure.__cause__, Boom)
        assert str(failure) == f"lane {op.lane} failed in {op}: Boom: it broke"
        assert_dead(engine, failure)


@pytest.mark.parametrize("kind", first_of_each_kind(plan_of("deferred", EVALUATION)), ids=str)
def test_an_exception_in_an_evaluation_is_raised_in_the_caller(kind):
    plan, num_before = plan_of("deferred", EVALUATION), len(plan_of("deferred", STEP).ops)
    index = first_of_each_kind(plan)[kind]

    def before(number: int) -> None:
        if number == num_before + index:
            raise Boom("it broke")

    with engine_on(decoder(), toy_options(**SETTINGS["deferred"]), HookedDevice(before=before)) as engine:
        write_weights(engine.layout, engine)
        engine.step(tiny_batch(2), lr=LR)
        with pytest.raises(LaneFailure) as caught:
            engine.evaluate(tiny_batch(2))
        assert (caught.value.lane, caught.value.label) == (plan.ops[index].lane, str(plan.ops[index]))
        assert_dead(engine, caught.value)


def test_every_kind_of_op_has_failed_in_the_tests_above():
    failed = {kind for _, kind in TRAINING} | set(first_of_each_kind(plan_of("deferred", EVALUATION)))
    assert failed == set(OpKind)


@pytest.mark.parametrize("waiting", ["result", "third step", "synchronize", "evaluate"])
def test_a_failure_is_heard_while_another_lane_is_stuck_for_long(waiting):
    plan, released, raised_s = plan_of("deferred", STEP), threading.Event(), []
    kinds = first_of_each_kind(plan)

    def before(number: int) -> None:
        if number == kinds[OpKind.BACKWARD]:
            released.wait(5)
        if number == kinds[OpKind.UPLOAD]:
            time.sleep(0.2)
            raised_s.append(time.perf_counter())
            raise Boom

    with engine_on(decoder(), toy_options(**SETTINGS["deferred"]), HookedDevice(before=before)) as engine:
        write_weights(engine.layout, engine)
        with pytest.raises(LaneFailure):
            results = [engine.step(tiny_batch(2), lr=LR) for _ in range(2)]
            match waiting:
                case "result":
                    _ = results[1].loss
                case "third step":
                    engine.step(tiny_batch(2), lr=LR)
                case "synchronize":
                    engine.synchronize()
                case "evaluate":
                    engine.evaluate(tiny_batch(2))
        assert time.perf_counter() - raised_s[0] < 1.0
        released.set()


@pytest.mark.parametrize("lane", LaneName)
def test_a_lane_that_is_slow_is_not_a_failure(lane):
    plan = plan_of("eager", STEP)
    index = next(i for i, op in enumerate(plan.ops) if op.lane is lane)
    options, steps = toy_options(**SETTINGS["eager"]), [(tiny_batch(2), LR)] * 2
    device = HookedDevice(before=lambda number: time.sleep(0.3 if number == index else 0.0))
    with engine_on(decoder(), options, device) as engine:
        write_weights(engine.layout, engine)
        for batch, lr in steps:
            engine.step(batch, lr=lr)
        engine.synchronize()
        found = state_hashes(engine)
    assert found == run_sequential(decoder(), options, steps).state


def test_what_was_done_before_a_failure_can_still_be_read():
    plan = plan_of("deferred", STEP)
    index = first_of_each_kind(plan)[OpKind.LOAD]

    def before(number: int) -> None:
        if number == 2 * len(plan.ops) + index:
            raise Boom

    options = toy_options(**SETTINGS["deferred"])
    with engine_on(decoder(), options, HookedDevice(before=before)) as engine:
        write_weights(engine.layout, engine)
        results = [engine.step(tiny_batch(2), lr=LR) for _ in range(2)]
        results[1].wait()
        results.append(engine.step(tiny_batch(2), lr=LR))
        with pytest.raises(LaneFailure):
            _ = results[2].loss
        expected = run_sequential(decoder(), options, [(tiny_batch(2), LR)] * 2)
        assert tuple(r.loss for r in results[:2]) == expected.losses
        assert tuple(r.grad_norm for r in results[:2]) == expected.norms
        assert state_hashes(engine) == expected.state
        assert engine.read(0, 0, 4).shape == (4,)


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
    writers = (OpKind.UPDATE, OpKind.UPDATE_REST, OpKind.SETTLE, OpKind.SETTLE_ROWS)
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
