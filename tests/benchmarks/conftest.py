"""Toy measurements that tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.toys import toy
from cases import measure
from lines import shared
from step import describe


@pytest.fixture(scope="session")
def measured() -> Callable[..., dict]:
    """What a case measured, each once a session."""
    seen: dict[str, dict] = {}

    def get(case: str, **changes: object) -> dict:
        settings = toy(case, **changes)
        if (key := repr(settings)) not in seen:
            seen[key] = measure(settings)
        return seen[key]

    return get


@pytest.fixture
def line(measured: Callable[..., dict]) -> Callable[..., dict]:
    """A line of results of a toy case, as step.py writes it."""

    def get(case: str, **changes: object) -> dict:
        told = describe(toy(case, **changes), measured(case, **changes))
        return shared("step", "a-run", ["step.py"]) | told

    return get
