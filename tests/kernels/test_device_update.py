"""The door to the optimizer's work on a device: what it does in torch, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from native.states import HYPER, State, assert_same_bits, mixed
from slideformer.kernels.device_update import squared_norm_, update_
from slideformer.optim import Hyper, reference_update


def test_without_a_gpu_it_is_the_specification(generator):
    expected = State(3000, torch.bfloat16, mixed, generator)
    found = expected.clone()
    plain = Hyper(HYPER.lr, weight_decay=0.0, step=HYPER.step, grad_scale=HYPER.grad_scale)
    reference_update(*expected.slice(0, 2000).args(), HYPER)
    reference_update(*expected.slice(2000, 3000).args(), plain)
    update_(*found.args(), HYPER, decay_numel=2000)
    assert_same_bits(found, expected)


def test_a_scale_given_as_a_tensor_is_used_in_the_place_of_the_number(generator):
    expected = State(500, torch.float32, mixed, generator)
    found = expected.clone()
    reference_update(*expected.args(), Hyper(1e-3, grad_scale=0.25))
    update_(*found.args(), Hyper(1e-3, grad_scale=7.0), grad_scale=torch.tensor([0.25]))
    assert_same_bits(found, expected)


def test_no_elements_are_no_work():
    empty = State(0, torch.float32, mixed, torch.Generator())
    update_(*empty.args(), HYPER)
    out = torch.ones(1)
    squared_norm_(empty.exp_avg, out)
    assert float(out) == 0.0


def test_the_sum_of_squares_is_the_squared_norm(generator):
    for dtype in (torch.bfloat16, torch.float32):
        grad, out = torch.randn(1000, generator=generator).to(dtype), torch.empty(())
        squared_norm_(grad, out)
        assert float(out) == float(grad.double().square().sum().float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4)}, "weight is torch.float32, must be torch.bfloat16"),
        ({"weight": torch.zeros(2, 2).bfloat16()}, "weight has 2 dimensions, must have 1"),
        ({"residual": torch.zeros(5).short()}, r"residual has shape \[5\], must be \[4\] like the others"),
        ({"grad": torch.zeros(4).half()}, "grad is torch.float16, must be torch.bfloat16 or torch.float32"),
        ({"exp_avg": torch.zeros(8)[::2]}, r"exp_avg has strides \(2,\), must be contiguous"),
        ({"exp_avg_sq": torch.zeros(4, device="meta")}, "exp_avg_sq is on meta, must be on cpu like the others"),
        ({"grad_scale": torch.zeros(4)}, "grad_scale has 4 elements, must have one"),
        ({"decay_numel": 5}, "decay_numel is 5, must be at least 0 and at most 4, the tensors' length"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, object], message: str):
    names = ("weight", "residual", "grad", "exp_avg", "exp_avg_sq")
    arguments = dict(zip(names, State(4, torch.bfloat16, mixed, torch.Generator()).args(), strict=True))
    with pytest.raises(ValueError, match=message):
        update_(hyper=HYPER, **{**arguments, **change})


def test_a_place_for_the_sum_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"out is torch.float64 \[\] on cpu, must be one torch.float32 on cpu"):
        squared_norm_(torch.ones(3), torch.zeros((), dtype=torch.float64))
