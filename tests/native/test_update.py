"""The native update against its specification, bit for bit."""

from contextlib import closing
from dataclasses import astuple, replace

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
from slideformer.native import HostKernels, NativeKernels, TorchKernels, load
from slideformer.native.kernels import TORCH_CHUNK_NUMEL
from slideformer.optim import reference_update, reference_update_rows

GUARD = 7  # elements before and after a tile that must stay as they are; odd, so that no start is aligned


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_every_length_at_unaligned_starts_equals_the_reference(
    kernels: NativeKernels, grad_dtype: torch.dtype | None, generator: torch.Generator
):
    for numel in range(66):
        whole = State(GUARD + numel + GUARD, grad_dtype, ordinary, generator)
        expected = whole.clone()
        reference_update(*expected.slice(GUARD, GUARD + numel).args(), HYPER)
        kernels.update(*whole.slice(GUARD, GUARD + numel).args(), HYPER)
        assert_same_bits(whole, expected)


@pytest.mark.parametrize("values", [ordinary, any_bits, near_flushing, mixed])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("change", [{}, {"eps": 0.0}, {"lr": 1e-37}, {"lr": 5.0}], ids=str)  # steps tiny and above one
def test_all_values_equal_the_reference(kernels, grad_dtype, values, change, generator):
    found = State(30_001, grad_dtype, values, generator)
    hyper = replace(HYPER, **change)
    expected = found.clone()
    for _ in range(2):
        reference_update(*expected.args(), hyper)
        kernels.update(*found.args(), hyper)
    assert_same_bits(found, expected)


def test_the_values_near_flushing_do_tell_flush_conventions_apart(generator: torch.Generator):
    """If no product fell below 2**-126 only before it is rounded, the test above would prove less than it says."""
    values = near_flushing(50_001, generator).double().abs()
    exact = torch.stack([values * factor for factor in astuple(HYPER.scalars())])
    assert ((exact < 2.0**-126) & (exact.float() == 2.0**-126)).any()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("numel", [4096, 8193, 5 * 4 * 4096 * 3 + 17])
def test_the_thread_count_does_not_change_a_bit(threads: int, numel: int, generator: torch.Generator):
    whole = State(GUARD + numel + GUARD, torch.bfloat16, ordinary, generator)
    expected = whole.clone()
    reference_update(*expected.slice(GUARD, GUARD + numel).args(), HYPER)
    with load(threads) as kernels:
        assert kernels.threads == threads
        kernels.update(*whole.slice(GUARD, GUARD + numel).args(), HYPER)
    assert_same_bits(whole, expected)


def test_the_stand_in_equals_the_reference_across_its_chunks(generator: torch.Generator):
    found = State(TORCH_CHUNK_NUMEL + 3, torch.float32, ordinary, generator)
    expected = found.clone()
    reference_update(*expected.args(), HYPER)
    TorchKernels().update(*found.args(), HYPER)
    assert_same_bits(found, expected)


@pytest.fixture(params=["native", "torch"])
def host(request: pytest.FixtureRequest):
    with closing(load(3) if request.param == "native" else TorchKernels()) as kernels:
        yield kernels


def table(num_rows: int, width: int, generator: torch.Generator) -> State:
    state = State(num_rows * width, None, any_bits, generator)
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
        setattr(state, name, getattr(state, name).view(num_rows, width))
    return state


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("named_grad_rows", [True, False])
@pytest.mark.parametrize("width", [1, 67])
@pytest.mark.parametrize("sorted_rows", [False, True], ids=["any order", "sorted"])
def test_rows_equal_the_reference_and_others_stay(kernels, grad_dtype, named_grad_rows, width, sorted_rows, generator):
    before = table(301, width, generator)
    rows = torch.randperm(301, generator=generator)[:200]
    grad = None if grad_dtype is None else ordinary(250 * width, generator).to(grad_dtype).view(250, width)
    grad_rows = torch.randint(-20, 250, (200,), generator=generator) if named_grad_rows else None
    if sorted_rows:  # rows and gradients one behind the other, broken off here and there
        rows = rows.sort().values
        grad_rows = (torch.arange(200) + 3).where(torch.arange(200) % 7 > 2, -1) if named_grad_rows else None
    expected = before.clone()
    for row in range(200):
        source = row if grad_rows is None else int(grad_rows[row])
        tile = [plane[rows[row]] for plane in expected.planes()]
        reference_update(*tile[:2], None if grad is None or source < 0 else grad[source], *tile[2:], HYPER)
    for first in (None,) if grad is None else (None, 0, 92, 99, 106, 250):  # from there on it lies elsewhere
        parts = (grad, None) if first is None else (grad[:first].clone(), grad[first:].clone())
        for host in (kernels, TorchKernels()):
            found = before.clone()
            host.update_rows(*found.planes(), rows, parts[0], grad_rows, HYPER, more=parts[1])
            assert_same_bits(found, expected)


def test_the_stand_in_updates_rows_across_its_chunks(generator: torch.Generator):
    width = TORCH_CHUNK_NUMEL // 2 - 1
    found, rows = table(5, width, generator), torch.tensor([4, 0, 2])
    grad = ordinary(4 * width, generator).view(4, width)
    expected = found.clone()
    reference_update_rows(*expected.planes(), rows, grad[:3], None, HYPER)
    TorchKernels().update_rows(*found.planes(), rows, grad, None, HYPER)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("rows", [[], [3], [0, 1, 2, 3, 4], [4, 4, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.float32])
@pytest.mark.parametrize("width", [1, 5, 9001])
def test_gathered_rows_are_the_rows(host: HostKernels, rows, dtype, width, generator):
    src = any_bits(5 * width, generator).to(dtype).view(5, width)
    out = torch.empty(len(rows), width, dtype=dtype)
    host.gather_rows(src, torch.tensor(rows, dtype=torch.int64), out)
    assert torch.equal(bits(out), bits(src[rows]))


def test_split_and_join_give_back_every_bit(kernels: NativeKernels, generator: torch.Generator):
    for numel in (*range(66), 100_003):
        master = any_bits(numel + 1, generator)[1:]
        found, expected = State(numel, None, ordinary, generator), State(numel, None, ordinary, generator)
        kernels.split(master, found.weight, found.residual)
        TorchKernels().split(master, expected.weight, expected.residual)
        assert torch.equal(bits(found.weight), bits(expected.weight))
        assert torch.equal(found.residual, expected.residual)
        for host in (kernels, TorchKernels()):
            back = torch.empty(numel)
            host.join(found.weight, found.residual, back)
            assert torch.equal(bits(back), bits(master))


def test_the_stream_loop_touches_the_same_elements_and_no_others(kernels: NativeKernels, generator: torch.Generator):
    whole = State(GUARD + 20_001 + GUARD, torch.bfloat16, ordinary, generator)
    whole.grad.fill_(1.0)
    before = whole.clone()
    kernels.stream(*whole.slice(GUARD, GUARD + 20_001).args())
    for changed, old in zip(whole.planes(), before.planes(), strict=True):
        differs = bits(changed) != bits(old)
        assert differs[GUARD:-GUARD].all()
        assert not differs[:GUARD].any() and not differs[-GUARD:].any()
