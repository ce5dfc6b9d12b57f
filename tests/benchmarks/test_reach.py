"""The search for the largest size, and how a case that does not fit ends."""

from __future__ import annotations

import sys

import pytest

import step
from reach import largest


@pytest.mark.parametrize("most", [1, 2, 3, 37, 63, 64, 100])
def test_the_largest_that_fits_is_found(most):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    assert largest(fits, 1, 50) == min(most, 50)
    assert len(tried) <= 14 and max(tried) <= 50


def test_of_large_sizes_it_is_found_to_one_part_in_64():
    found = largest(lambda size: size <= 1000, 1, 4096)
    assert 1000 - 1000 // 64 <= found <= 1000


def test_nothing_fits():
    assert largest(lambda size: False, 8, 64) == 0


def test_a_case_that_does_not_fit_ends_with_3_and_its_reason(monkeypatch, capsys):
    words = "--shape tiny --batch 2 --seq 16 --device cpu --engine max_host_memory=1000 --worker ours-streamed --run r"
    monkeypatch.setattr(sys, "argv", ["step.py", *words.split()])
    assert step.main() == 3
    assert capsys.readouterr().err.startswith("does not fit: ours-streamed: ")
