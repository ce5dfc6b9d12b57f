"""AdamW in Triton against its specification and the native library, bit for bit, on values that hurt."""

from __future__ import annotations

import pytest
import torch

from native.states import (
    GRAD_DTYPES,
    HYPER,
    State,
    any_bits,
    assert_same_bits,
    bits,
    mixed,
    near_flushing,
    ordinary,
)
from slideformer.kernels.adamw import BLOCK, adamw_
from slideformer.native import load
from slideformer.optim import Hyper, reference_update

LENGTHS = [1, 5 * 123, BLOCK, 3 * BLOCK + 1]


def update(state: State, hyper: Hyper, *, decay_numel: int | None = None, grad_scale: torch.Tensor | None = None):
    numel = state.weight.numel()
    adamw_(*state.args(), hyper, decay_numel=numel if decay_numel is None else decay_numel, grad_scale=grad_scale)


@pytest.fixture(autouse=True)
def quiet_numpy():
    """The interpreter computes in numpy, which warns of overflows and NaNs; they are meant here."""
    import numpy

    with numpy.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("values", [ordinary, any_bits, near_flushing, mixed])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_it_gives_the_bits_of_the_specification(numel, grad_dtype, values, generator):
    expected = State(numel, grad_dtype, values, generator)
    found = expected.clone()
    for _ in range(2):
        reference_update(*expected.args(), HYPER)
        update(found, HYPER)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_it_gives_the_bits_of_the_native_library(grad_dtype, generator):
    expected = State(20_001, grad_dtype, mixed, generator)
    found = expected.clone()
    native = load(threads=1)
    native.update(*expected.args(), HYPER)
    native.close()
    update(found, HYPER)
    assert_same_bits(found, expected)


def test_what_does_not_decay_is_as_if_weight_decay_were_zero(generator):
    expected = State(3000, torch.bfloat16, mixed, generator)
    for decay_numel in (0, 1, 1777, 3000):
        one, found = expected.clone(), expected.clone()
        plain = Hyper(HYPER.lr, weight_decay=0.0, step=HYPER.step, grad_scale=HYPER.grad_scale)
        reference_update(*one.slice(0, decay_numel).args(), HYPER)
        reference_update(*one.slice(decay_numel, 3000).args(), plain)
        update(found, HYPER, decay_numel=decay_numel)
        assert_same_bits(found, one)


@pytest.mark.parametrize("scale", [0.37, 1.0, 300.7, 1e-40, float("nan")])
def test_a_scale_on_the_device_is_the_scale(scale, generator):
    expected = State(2000, torch.float32, mixed, generator)
    found = expected.clone()
    reference_update(*expected.args(), Hyper(HYPER.lr, step=3, grad_scale=scale))
    update(found, Hyper(HYPER.lr, step=3, grad_scale=5.0), grad_scale=torch.tensor(scale))
    assert_same_bits(found, expected)


def test_only_the_given_elements_are_written(generator):
    whole = State(5000, torch.bfloat16, ordinary, generator)
    before = whole.clone()
    update(whole.slice(1001, 3333), HYPER)
    for part in (slice(0, 1001), slice(3333, None)):
        for found, expected in zip(whole.planes(), before.planes(), strict=True):
            assert torch.equal(bits(found[part]), bits(expected[part]))
    assert not torch.equal(whole.exp_avg[1001:3333], before.exp_avg[1001:3333])
