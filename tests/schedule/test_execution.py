"""Plans run by an interpreter that knows only lanes, waits and declarations, in the worst orders it can find."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule.plans import (
    Case,
    Interpreter,
    Race,
    WrongContent,
    all_waits,
    cases,
    examples,
    passes,
    random_rank,
    starve,
    without_wait,
)

EXAMPLES = examples()
EXAMPLE = pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES.keys())


@given(st.one_of(cases(), passes()), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_any_order_that_lanes_and_waits_allow_finds_every_content(case: Case, seed: int):
    interpreter = Interpreter(case, runs=3)
    interpreter.run(random_rank(seed))
    updates = 3 if case.plan.trains else 0
    for unit in range(len(case.layout.units)):
        trained = len(case.layout.tiles(unit, trained=True))
        for buffer, value in interpreter.holds.items():
            if buffer.place == "weight" and buffer.index[0] == unit:
                assert value[3] == (updates if buffer.index[1] < trained else 0)


@EXAMPLE
def test_every_single_wait_is_needed_by_some_order(case: Case):
    """Without it, there is an order in which two ops hold a buffer at once or a content is wrong."""
    for index, wait in all_waits(case.plan):
        broken = Case(case.layout, case.options, without_wait(case.plan, index, wait))
        awaited = (2 - wait.age, wait.index)  # op `index` of run 2 waits for this
        with pytest.raises((Race, WrongContent)):
            Interpreter(broken, runs=3).run(starve(awaited))


@EXAMPLE
def test_runs_overlap_where_the_waits_allow_it(case: Case):
    """The orders tried are not the program's own: some op of a run ends before one of the run before."""

    def overlaps(seed: int) -> bool:
        interpreter = Interpreter(case, runs=2)
        interpreter.run(random_rank(seed))
        runs = [run for run, _ in interpreter.order]
        return runs != sorted(runs)

    assert any(overlaps(seed) for seed in range(5))
