"""Gated linear units against float64 (kernels/elementwise.py has the bounds)."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import check_glu
from slideformer.kernels.glu import ACTIVATIONS, glu

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)


@DTYPE
@ACTIVATION
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 123), (3, 4097)], ids=str)
def test_output_and_gradients_are_within_rounding_of_float64(shape, halves, activation, dtype):
    check_glu(dtype, shape, "cpu", activation=activation, halves=halves)


def test_many_rows():
    """In three dimensions; the interpreter takes its time, so no more."""
    check_glu(torch.float32, (5, 23, 123), "cpu", activation="silu", halves=False)


@ACTIVATION
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_small_and_large_values(scale, activation):
    check_glu(torch.float32, (50, 60), "cpu", activation=activation, halves=False, scale=scale)


@ACTIVATION
@pytest.mark.parametrize("value", [-1e4, -200.0, 200.0, 1e4])
def test_far_from_zero_nothing_overflows(value, activation):
    gate = torch.full((2, 4), value, requires_grad=True)
    up = torch.ones(2, 4, requires_grad=True)
    out = glu(gate + 0, up + 0, activation=activation)
    gate_grad, up_grad = torch.autograd.grad(out, [gate, up], torch.ones(2, 4))
    expected = max(value, 0.0)
    assert bool((out == expected).all()) and bool((up_grad == expected).all())
    assert bool((gate_grad == float(value > 0)).all())
