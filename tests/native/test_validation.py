"""What does not fit is refused with the tensor's name before a pointer reaches C++."""

from contextlib import closing

import pytest
import torch

from native.states import HYPER, State, assert_same_bits, ordinary
from slideformer.native import TorchKernels, load


@pytest.fixture(params=["native", "torch"])
def host(request: pytest.FixtureRequest):
    with closing(load(2) if request.param == "native" else TorchKernels()) as kernels:
        yield kernels


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda t: t.half(), "weight is torch.float16, must be torch.bfloat16"),
        ("weight", lambda t: t.view(2, 4), "weight has 2 dimensions, must have 1"),
        ("residual", lambda t: t.int(), "residual is torch.int32, must be torch.int16"),
        ("grad", lambda t: t.half(), "grad is torch.float16, must be torch.bfloat16 or torch.float32"),
        ("grad", lambda t: t[:7], r"grad has shape \[7\], must be \[8\] like the others"),
        ("grad", lambda t: t.repeat(2)[::2], r"grad has strides \(2,\), must be contiguous"),
        ("exp_avg", lambda t: t.double(), "exp_avg is torch.float64, must be torch.float32"),
        ("exp_avg_sq", lambda t: t.to("meta"), "exp_avg_sq is on meta, must be on the CPU"),
    ],
)
def test_an_update_names_the_tensor_that_does_not_fit(host, name, change, message, generator):
    state = State(8, torch.float32, ordinary, generator)
    before = state.clone()
    setattr(state, name, change(getattr(state, name)))
    with pytest.raises(ValueError, match=message):
        host.update(*state.args(), HYPER)
    setattr(state, name, getattr(before, name))
    assert_same_bits(state, before)


@pytest.mark.parametrize(
    ("rows", "grad_rows", "message"),
    [
        ([0, 5], None, r"rows\[1\] is 5, must be at least 0 and less than 5"),
        ([-1, 0], None, r"rows\[0\] is -1, must be at least 0"),
        ([3, 1, 3], None, r"rows\[2\] is 3, which occurs before"),
        ([0, 1], [0, 3], r"grad_rows\[1\] is 3, but grad has 3 rows"),
        ([0, 1, 2, 3], None, "rows has 4 entries, but grad has 3 rows"),
        ([0, 1], [0], r"grad_rows has shape \[1\], must be \[2\]"),
    ],
)
def test_bad_row_numbers_are_named_and_nothing_is_changed(host, rows, grad_rows, message, generator):
    state = State(5 * 4, None, ordinary, generator)
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
        setattr(state, name, getattr(state, name).view(5, 4))
    before = state.clone()
    grad_rows = None if grad_rows is None else torch.tensor(grad_rows)
    with pytest.raises(ValueError, match=message):
        host.update_rows(*state.planes(), torch.tensor(rows), torch.ones(3, 4), grad_rows, HYPER)
    assert_same_bits(state, before)


def test_a_gradient_of_another_width_is_refused(host, generator):
    state = State(5 * 4, None, ordinary, generator)
    planes = [plane.view(5, 4) for plane in state.planes()]
    with pytest.raises(ValueError, match=r"grad has shape \[3, 5\], must be \[3, 4\]"):
        host.update_rows(*planes, torch.tensor([0]), torch.ones(3, 5), None, HYPER)
    with pytest.raises(ValueError, match=r"more has shape \[2, 5\], must be \[2, 4\]"):
        host.update_rows(*planes, torch.tensor([0]), torch.ones(3, 4), None, HYPER, more=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"more is torch.bfloat16, must be torch.float32"):
        host.update_rows(*planes, torch.tensor([0]), torch.ones(3, 4), None, HYPER, more=torch.ones(2, 4).bfloat16())
    with pytest.raises(ValueError, match="more is given without grad"):
        host.update_rows(*planes, torch.tensor([0]), None, None, HYPER, more=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"grad_rows\[1\] is 5, but grad has 5 rows"):
        host.update_rows(*planes, torch.arange(2), torch.ones(3, 4), torch.tensor([4, 5]), HYPER, more=torch.ones(2, 4))


def test_gather_refuses_rows_outside_and_an_output_that_does_not_fit(host):
    src, rows = torch.zeros(5, 4), torch.tensor([0, 7])
    with pytest.raises(ValueError, match=r"rows\[1\] is 7, must be at least 0 and less than 5"):
        host.gather_rows(src, rows, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"out has shape \[3, 4\], must be \[2, 4\]"):
        host.gather_rows(src, rows, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="out is torch.int16, must be torch.float32"):
        host.gather_rows(src, rows, torch.zeros(2, 4, dtype=torch.int16))


def test_an_unknown_instruction_set_and_a_thread_count_of_zero_are_refused():
    with pytest.raises(ValueError, match="isa is 'avx1024', this machine and build have baseline"):
        load(1, isa="avx1024")
    with pytest.raises(ValueError, match="threads is 0, must be at least 1"):
        load(0)
