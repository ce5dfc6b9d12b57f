"""Whatever fails, and wherever: the caller hears of it within a second, nothing hangs, and all threads end."""

from __future__ import annotations

import threading
import time

import pytest

from engine.test_generation_failures import KINDS as GENERATION
from engine.toys import (
    LR,
    HookedDevice,
    engine_on,
    run_sequential,
    state_hashes,
    tiny_batch,
    toy_options,
    write_weights,
)
from engine.trouble import (
    EVALUATION,
    SETTINGS,
    STEP,
    Boom,
    decoder,
    doors,
    first_of_each_kind,
    plan_of,
)
from slideformer.device import LaneFailure
from slideformer.engine import Engine
from slideformer.schedule import LaneName, OpKind
from slideformer.schedule.ops import DISK_LANES


def training_kinds() -> list[tuple[str, OpKind]]:
    """Each kind in the first program that has it."""
    found = {kind: name for name in reversed(SETTINGS) for kind in first_of_each_kind(plan_of(name, STEP))}
    return [(name, kind) for kind, name in found.items()]


TRAINING = training_kinds()


def assert_dead(engine: Engine, failure: LaneFailure) -> None:
    """Every door says what happened, again and again, and none hangs."""
    for _ in range(2):
        for use in doors(engine):
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
    assert failed | GENERATION == set(OpKind)


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
    program = "disk" if lane in DISK_LANES else "eager"
    plan = plan_of(program, STEP)
    index = next(i for i, op in enumerate(plan.ops) if op.lane is lane)
    options, steps = toy_options(**SETTINGS[program]), [(tiny_batch(2), LR)] * 2
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
