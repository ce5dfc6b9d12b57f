"""Cross entropies and their gradient for a chunk of logits against float64: all columns at once, and by slices."""

from __future__ import annotations

import pytest
import torch

from slideformer.kernels.softmax_gradient import add_softmax_sums_, gradient_of_slice_, softmax_gradient_

FACTOR = 1 / 7
CASES = [(5, 123, 1.0, 0.0), (3, 16384, 1.0, 0.0), (2, 16385, 1.0, 0.0), (4, 40001, 0.125, 0.0), (5, 307, 1.0, 30.0)]
CASE = pytest.mark.parametrize(("rows", "columns", "scale", "cap"), CASES)
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    z = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
    z[0] = 60.0  # equal and large
    z[-1, 0] = -60.0 if dtype is torch.float16 else -1e30  # far below all others
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[0] = columns - 1
    return z, labels


def assert_right(
    losses: torch.Tensor, grad: torch.Tensor, z: torch.Tensor, labels: torch.Tensor, scale: float, cap: float
) -> None:
    exact = z.double().requires_grad_()
    logits = exact * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (exact_grad,) = torch.autograd.grad(expected.sum() * FACTOR, exact)
    # fp32 inside: exponents carry the error of their argument, up to ~60 units of 2**-23 each, and a sum over the
    # columns adds log2(columns) roundings; the result is rounded once to its dtype.
    tolerance = 2.0**-23 * (4 * 64 + z.shape[1].bit_length())
    far = (losses.double() - expected.detach()).abs() > tolerance * (1 + logits.detach().abs().amax(1))
    assert not far.any(), (losses, expected)
    half_ulp, least = (2.0**-24, 0.0) if z.dtype is torch.float32 else (2.0**-11, 2.0**-25)
    bound = FACTOR * scale * tolerance + exact_grad.abs() * (half_ulp + tolerance) + least
    wrong = ((grad.double() - exact_grad).abs() > bound).nonzero()
    assert len(wrong) == 0, (len(wrong), wrong[0].tolist())


@CASE
@DTYPE
def test_all_columns_at_once(dtype, rows, columns, scale, cap):
    z, labels = inputs(rows, columns, dtype)
    grad = z.clone()
    losses = softmax_gradient_(grad, labels, scale=scale, softcap=cap or None, factor=FACTOR)
    assert_right(losses, grad, z, labels, scale, cap)


@CASE
@DTYPE
def test_by_slices(dtype, rows, columns, scale, cap):
    z, labels = inputs(rows, columns, dtype)
    cuts = [0, 1, columns // 3, columns // 3 + 17, columns]
    maximum, total, picked = torch.full((rows,), float("-inf")), torch.zeros(rows), torch.full((rows,), float("nan"))
    slices = [(a, z[:, a:b].contiguous()) for a, b in zip(cuts, cuts[1:], strict=False)]
    for first, part in slices:
        before = part.clone()
        add_softmax_sums_(part, labels, maximum, total, picked, first_column=first, scale=scale, softcap=cap or None)
        assert torch.equal(part, before)
    log_sum = maximum + total.log()
    for first, part in slices:
        gradient_of_slice_(part, labels, log_sum, first_column=first, scale=scale, softcap=cap or None, factor=FACTOR)
    assert_right(log_sum - picked, torch.cat([part for _, part in slices], dim=1), z, labels, scale, cap)
