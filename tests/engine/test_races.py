"""The executor waits where the plan says and nowhere else: without any one wait, a race is lost, and it shows.

Each race is forced, not hoped for: the op that is no longer waited for is held until the op that should wait is done.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    HookedDevice,
    Outcome,
    engine_on,
    plans_of,
    run_engine,
    run_sequential,
    tiny_batch,
    tiny_decoder,
    toy_options,
    use_plan,
)
from schedule.plans import all_waits, without_wait
from slideformer.device import LaneFailure
from slideformer.schedule import LaneName, Plan, Wait

HELD_S = 10.0  # never reached
NUM_STEPS = 3

SPILLING = {"saved_on_device": 1, "hidden_ring": 2, "micro_batches": 2, "window": 1, "grad_slots": 1}
AHEAD = {"update": "deferred", "max_grad_norm": 2.0}  # of the three steps some are clipped
SETTINGS = {
    "eager": (dict(tied=True, dtype=torch.float32), {**EAGER, "window": 2, "ring": 2}),
    "eager, spilling": (dict(tied=False, dtype=torch.bfloat16), {**EAGER, **SPILLING, "ring": 1}),
    "deferred": (dict(tied=False, dtype=torch.float32), DEFERRED),
    "deferred, spilling": (dict(tied=True, dtype=torch.bfloat16), {**DEFERRED, **SPILLING}),
    "deferred, ahead": (dict(tied=True, dtype=torch.float32), {**AHEAD, "ahead": (0, 1)}),
    "deferred, all ahead": (dict(tied=False, dtype=torch.bfloat16), {**AHEAD, **SPILLING, "ahead": (0, 1, 2, 3, 4)}),
}


class NotOvertaken(AssertionError):
    """The op that should wait did not run ahead."""


def steps(micro_batches: int) -> list:
    """Batches of different lengths."""
    return [(tiny_batch(micro_batches, length=n, seed=n), LR) for n in (12, 7, 9)[:NUM_STEPS]]


def run(name: str, *, without: tuple[int, Wait] | None = None, device: HookedDevice | None = None) -> Outcome:
    """Joined steps with the plan as it is, or less one wait and unproven."""
    model, settings = SETTINGS[name]
    options = toy_options(**settings)
    with engine_on(tiny_decoder(blocks=2, **model), options, device or HookedDevice(poison=True)) as engine:
        if without is not None:
            use_plan(engine, without_wait(engine.plan, *without))
        return run_engine(engine, steps(options.micro_batches))


def wait_classes(plan: Plan) -> dict[str, tuple[int, Wait]]:
    """One wait of each sort: which kind of op waits for which, in the same run or the one before."""
    found: dict[str, tuple[int, Wait]] = {}
    for index, wait in all_waits(plan):
        waiter, awaited = plan.ops[index], plan.ops[wait.index]
        found.setdefault(f"{waiter.kind} after {awaited.kind}{' of the run before' * wait.age}", (index, wait))
    return found


def plan_of(name: str) -> Plan:
    model, settings = SETTINGS[name]
    decoder, options = tiny_decoder(blocks=2, **model), toy_options(**settings)
    return plans_of(decoder.layout, options, decoder.dtype)[0]


def races() -> list[tuple[str, str, tuple[int, Wait]]]:
    """Each sort of wait once in an eager and once in a deferred program."""
    found: dict[tuple[str, str], tuple[str, str, tuple[int, Wait]]] = {}
    for name, (_, settings) in SETTINGS.items():
        for sort, wait in wait_classes(plan_of(name)).items():
            found.setdefault((settings["update"], sort), (name, sort, wait))
    return list(found.values())


RACES = races()


@pytest.fixture(scope="module")
def correct() -> dict[str, Outcome]:
    outcomes = {}
    for name, (model, settings) in SETTINGS.items():
        options = toy_options(**settings)
        outcomes[name] = run_sequential(tiny_decoder(blocks=2, **model), options, steps(options.micro_batches))
    return outcomes


@pytest.mark.parametrize("name", ["eager, spilling", "deferred", "deferred, all ahead"])
@pytest.mark.parametrize("slow", LaneName)
def test_with_every_wait_no_race_is_lost_however_slow_a_lane_is(name, slow, correct):
    num_ops, ops = len(plan_of(name).ops), plan_of(name).ops

    def before(number: int) -> None:
        if ops[number % num_ops].lane is slow:
            time.sleep(2e-3)

    assert run(name, device=HookedDevice(poison=True, before=before)) == correct[name]


@pytest.mark.parametrize(("name", "sort", "without"), RACES, ids=lambda v: v if isinstance(v, str) else "")
def test_without_a_wait_the_race_is_lost_and_shows(name, sort, without, correct):
    index, wait = without
    num_ops = len(plan_of(name).ops)
    over = [threading.Event() for _ in range(NUM_STEPS)]  # by run of the op that should wait
    overtaken = []

    def before(number: int) -> None:
        run_of_waiter = number // num_ops + wait.age
        if number % num_ops == wait.index and run_of_waiter < NUM_STEPS:
            since = time.perf_counter()
            while not over[run_of_waiter].wait(0.01) and device.failure is None:
                assert time.perf_counter() - since < HELD_S, "the wait that was taken out is implied by others"
            overtaken.append(over[run_of_waiter].is_set())

    def after(number: int) -> None:
        if number % num_ops == index:
            over[number // num_ops].set()

    device = HookedDevice(poison=True, before=before, after=after)
    try:
        found = run(name, without=without, device=device)
    except LaneFailure as failure:
        assert not isinstance(failure.__cause__, NotOvertaken)
        found = None
    assert found is None or all(overtaken), "the op that is not waited for any more was overtaken"
    assert found != correct[name]
