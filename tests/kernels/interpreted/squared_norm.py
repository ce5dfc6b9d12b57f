"""The sum of squares in Triton against fp64, within a derived bound."""

from __future__ import annotations

import pytest
import torch

from slideformer.kernels.squared_norm import BLOCK, squared_norm_

U = 2.0**-24


def squared_norm(grad: torch.Tensor) -> float:
    out = torch.full((), float("nan"))
    squared_norm_(grad, out)
    return float(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 5 * 123, BLOCK, BLOCK * 8 + 7])
def test_it_is_within_rounding_of_fp64(numel, dtype, generator, monkeypatch):
    """All terms are positive, so errors are relative. A bf16's square is exact in fp32. A term passes one rounding for
    itself (fp32 only), one for each block that its program adds (2 here at most), and one when the result is stored;
    sums in fp64 are nothing beside that."""
    monkeypatch.setattr("slideformer.kernels.squared_norm.MAX_SHARES", 8)
    grad = (torch.randn(numel, generator=generator) * 1e-3).to(dtype)
    expected = float(grad.double().square().sum())
    assert abs(squared_norm(grad) - expected) <= 4 * U * expected


def test_what_is_not_finite_shows():
    for value in (float("nan"), float("inf")):
        grad = torch.ones(10_000)
        grad[7777] = value
        assert not torch.isfinite(torch.tensor(squared_norm(grad)))


def test_two_runs_give_the_same_bits(generator):
    grad = torch.randn(100_001, generator=generator)
    assert squared_norm(grad) == squared_norm(grad)
