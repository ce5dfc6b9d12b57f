"""The optimizer's kernels on the GPU: bits of the specification, no wait, no second compilation."""

from __future__ import annotations

import pytest
import torch

from native.states import GRAD_DTYPES, HYPER, State, any_bits, assert_same_bits, mixed, near_flushing, ordinary
from slideformer.kernels.adamw import _adamw
from slideformer.kernels.device_update import squared_norm_, update_
from slideformer.optim import Hyper, reference_update

U = 2.0**-24


def on_gpu(state: State) -> State:
    moved = state.clone()
    for name, tensor in vars(moved).items():
        setattr(moved, name, None if tensor is None else tensor.cuda())
    return moved


def on_cpu(state: State) -> State:
    moved = state.clone()
    for name, tensor in vars(moved).items():
        setattr(moved, name, None if tensor is None else tensor.cpu())
    return moved


@pytest.mark.parametrize("values", [ordinary, any_bits, near_flushing, mixed])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("start", [0, 1, 8], ids=["aligned", "odd", "by 8"])
def test_it_gives_the_bits_of_the_specification(start, grad_dtype, values, generator):
    expected = State(300_001, grad_dtype, values, generator)
    whole = on_gpu(expected)
    found, wanted = whole.slice(start, 300_001), expected.slice(start, 300_001)
    for _ in range(3):
        reference_update(*wanted.args(), HYPER)
        update_(*found.args(), HYPER)
    assert_same_bits(on_cpu(whole), expected)


def test_decay_ends_where_it_is_told_to(generator):
    expected = State(100_000, torch.bfloat16, mixed, generator)
    found = on_gpu(expected)
    plain = Hyper(HYPER.lr, weight_decay=0.0, step=HYPER.step, grad_scale=HYPER.grad_scale)
    reference_update(*expected.slice(0, 77_777).args(), HYPER)
    reference_update(*expected.slice(77_777, 100_000).args(), plain)
    update_(*found.args(), HYPER, decay_numel=77_777)
    assert_same_bits(on_cpu(found), expected)


def test_new_numbers_compile_nothing_and_nothing_waits(generator):
    """torch refuses whatever would wait; the scale is written by the device long after the launch."""
    expected = State(1 << 20, torch.bfloat16, ordinary, generator)
    found = on_gpu(expected)
    scale = torch.ones((), device="cuda")
    update_(*on_gpu(expected).args(), HYPER, grad_scale=scale)
    num_compiled = sum(len(entry[0]) for entry in _adamw.device_caches.values())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        for step in range(1, 6):
            scale.fill_(0.5 / step)
            update_(*found.args(), Hyper(1e-3 / step, weight_decay=0.1, step=step), grad_scale=scale)
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(len(entry[0]) for entry in _adamw.device_caches.values()) == num_compiled
    for step in range(1, 6):
        factor = float(torch.tensor(0.5 / step))
        reference_update(*expected.args(), Hyper(1e-3 / step, weight_decay=0.1, step=step, grad_scale=factor))
    assert_same_bits(on_cpu(found), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 5 * 123, 100_000_003])
def test_the_sum_of_squares_is_within_rounding_of_fp64(numel, dtype, generator):
    """As in tests/kernels; a program adds up to 24 blocks here (100 M elements in 1,024 programs of 4,096)."""
    grad = (torch.randn(numel, generator=generator) * 1e-3).to(dtype)
    out = torch.empty((), device="cuda")
    squared_norm_(grad.cuda(), out)
    expected = float(grad.double().square().sum())
    assert abs(float(out) - expected) <= 28 * U * expected
