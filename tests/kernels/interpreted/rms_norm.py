"""RMSNorm and its gradients against float64 (kernels/elementwise.py has the bounds)."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import CONVENTIONS, check_rms_norm, randn
from slideformer.kernels.rms_norm import Launch, rms_norm

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
CONVENTION = pytest.mark.parametrize("convention", CONVENTIONS)
ADDS = pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])


@DTYPE
@CONVENTION
@ADDS
@pytest.mark.parametrize("shape", [(1, 1), (5, 123, 123), (70, 32), (3, 4097)], ids=str)
def test_output_and_gradients_are_within_rounding_of_float64(shape, adds, convention, dtype):
    check_rms_norm(dtype, shape, "cpu", convention=convention, adds=adds)


@DTYPE
@ADDS
@pytest.mark.parametrize("scale", [1e-4, 60.0])
def test_small_and_large_values(scale, adds, dtype):
    """eps decides at 1e-4, squares leave fp16 at 60."""
    check_rms_norm(dtype, (7, 200), "cpu", convention="llama", adds=adds, scale=scale)


@ADDS
def test_backward_may_write_over_the_gradient(adds):
    check_rms_norm(torch.float32, (40, 65), "cpu", convention="gemma", adds=adds, overwrite_grad=True)


@pytest.mark.parametrize("programs_per_sm", [0, 2])
@pytest.mark.parametrize("shape", [(32 * 7 + 5, 100), (7, 3072)], ids=str)
def test_rows_are_shared_between_programs(shape, programs_per_sm, monkeypatch):
    """With 2 programs (the CPU counts as one multiprocessor) each walks over several tiles, the last one not full."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(f"slideformer.kernels.rms_norm.{name}", Launch(4, 2, programs_per_sm))
    check_rms_norm(torch.float32, shape, "cpu", convention="llama", adds=True)


def test_heads_before_the_sequence_are_taken_as_they_lie():
    x = randn((2, 7, 3, 16), torch.float32, 0, "cpu").transpose(1, 2)
    weight = torch.ones(16)
    out = rms_norm(x, weight, eps=1e-6)
    assert out.stride() == x.stride()
    assert torch.equal(out, rms_norm(x.contiguous(), weight, eps=1e-6))


def test_a_frozen_weight_has_no_gradient_computed():
    x = randn((4, 16), torch.float32, 0, "cpu").requires_grad_()
    out = rms_norm(x, torch.ones(16), eps=1e-6)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert grad.shape == x.shape


def test_a_gradient_that_shares_memory_is_left_alone():
    x = randn((4, 16), torch.float32, 0, "cpu").requires_grad_()
    out = rms_norm(x, torch.ones(16), eps=1e-6, overwrite_grad=True)
    one = torch.ones(1)
    torch.autograd.grad(out, x, one.expand(4, 16))
    assert float(one) == 1.0
