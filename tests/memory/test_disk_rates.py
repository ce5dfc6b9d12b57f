"""Rates are those of the bytes that moved, within the time that was given, and nothing is left."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from slideformer.memory import DiskFolder, disk_rates
from slideformer.memory.disk_rates import EXTENT_NBYTES, _moved


@pytest.mark.parametrize(
    ("seconds", "once", "expected"), [(4.5, False, 5), (4.5, True, 3), (0, True, 2), (2, False, 2)]
)
def test_extents_move_in_turn_until_time_is_over(monkeypatch, seconds: float, once: bool, expected: int) -> None:
    moved: list[int] = []
    clock = types.SimpleNamespace(perf_counter=lambda: float(len(moved)))  # each takes a second
    monkeypatch.setitem(_moved.__globals__, "time", clock)
    told = _moved(lambda extent, memory: moved.append(extent), torch.empty(0), range(4, 7), seconds, once=once)
    assert moved == [4, 5, 6, 4, 5][:expected]
    assert told == (expected, EXTENT_NBYTES)


def test_the_disk_is_measured_each_way_and_nothing_is_left(tmp_path: Path) -> None:
    with DiskFolder(tmp_path / "d") as folder:
        rates = disk_rates(folder, seconds=0)
        assert folder.writes.nbytes + folder.reads.nbytes == 10 * EXTENT_NBYTES  # two at a time, five times
        assert list(folder.path.iterdir()) == [folder.path / "slideformer.lock"] and folder.nbytes == 0
    assert min(rates.read, rates.write, rates.both_read, rates.both_write) > 0
