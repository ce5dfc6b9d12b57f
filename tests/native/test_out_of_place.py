"""An update that writes elsewhere: the same new state, and the old one untouched."""

import pytest
import torch

from native.states import GRAD_DTYPES, HYPER, State, assert_same_bits, mixed, ordinary
from slideformer.memory.host import Arena
from slideformer.native import HostKernels, NativeKernels, Parts, Planes, TorchKernels

PARTS = [Parts.WEIGHT, Parts.WEIGHT | Parts.RESIDUAL, Parts.RESIDUAL | Parts.MOMENTS, Parts.MOMENTS, Parts.RESIDUAL]


def elsewhere(numel: int, *, aligned: bool) -> State:
    """Room for a state: on cache lines, where stores go past the caches, or just off them."""
    room = State.__new__(State)
    for name, dtype in zip(Planes._fields, (torch.bfloat16, torch.int16, torch.float32, torch.float32), strict=True):
        shift = 0 if aligned else 1
        piece = Arena((numel + shift) * dtype.itemsize, name).take(numel + shift, dtype)[shift:]
        assert (piece.data_ptr() % 64 == 0) is aligned
        setattr(room, name, piece)
    return room


def check(kernels: HostKernels, numel: int, grad_dtype: torch.dtype | None, values, generator, *, aligned: bool):
    old = State(numel, grad_dtype, values, generator)
    before, expected = old.clone(), old.clone()
    TorchKernels().update(*expected.args(), HYPER)
    new = elsewhere(numel, aligned=aligned)
    kernels.update(*old.args(), HYPER, out=Planes(*new.planes()))
    assert_same_bits(new, expected)
    assert_same_bits(old, before)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_the_new_state_is_that_of_an_update_in_place(kernels: NativeKernels, grad_dtype, aligned, generator):
    for numel in (*range(1, 66), 3 * 4 * 4096 + 17):
        check(kernels, numel, grad_dtype, ordinary, generator, aligned=aligned)
    check(kernels, 30_001, grad_dtype, mixed, generator, aligned=aligned)


def test_the_stand_in_writes_elsewhere_too(generator):
    check(TorchKernels(), 70_001, torch.bfloat16, mixed, generator, aligned=True)


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_only_the_parts_asked_for_are_written(kernels: NativeKernels, grad_dtype, aligned, parts, generator):
    for numel in (1, 3, 7, 8, 15, 16, 17, 33, 2 * 4096 + 17):
        old = State(numel, grad_dtype, mixed, generator)
        before, updated = old.clone(), old.clone()
        TorchKernels().update(*updated.args(), HYPER)
        room, expected = elsewhere(numel, aligned=aligned), State(numel, None, mixed, generator)
        for name in parts.fields():
            getattr(expected, name).copy_(getattr(updated, name))
        for host in (kernels, TorchKernels()):
            for name in Planes._fields:  # what was asked for comes, and what was not stays
                value = getattr(expected, name)
                getattr(room, name).copy_(value if name not in parts.fields() else torch.zeros_like(value))
            host.update(*old.args(), HYPER, out=Planes(*room.planes()), parts=parts)
            assert_same_bits(room, expected)
            assert_same_bits(old, before)


def test_a_part_in_place_is_refused(kernels: NativeKernels, generator):
    state = State(100, torch.bfloat16, ordinary, generator)
    for host in (kernels, TorchKernels()):
        with pytest.raises(ValueError, match=r"parts is .* without out"):
            host.update(*state.args(), HYPER, parts=Parts.WEIGHT)


@pytest.mark.parametrize("parts", [Parts.ALL, Parts.WEIGHT, Parts.RESIDUAL | Parts.MOMENTS, Parts.MOMENTS], ids=str)
@pytest.mark.parametrize("width", [32, 48, 7])
def test_rows_go_elsewhere_and_only_they(kernels: NativeKernels, width: int, parts, generator):
    num_rows, rows = 50, torch.tensor([3, 0, 49, 20])
    old = State(num_rows * width, None, mixed, generator)
    grad = torch.randn(4, width, generator=generator).bfloat16()
    before, new = old.clone(), elsewhere(num_rows * width, aligned=True)
    for tensor, source in zip(new.planes(), State(num_rows * width, None, ordinary, generator).planes(), strict=True):
        tensor.copy_(source)
    expected = new.clone()
    matrix = lambda s: Planes(*(t.view(num_rows, width) for t in s.planes()))  # noqa: E731
    for target, source in zip(matrix(expected), matrix(old), strict=True):
        target[rows] = source[rows]
    TorchKernels().update_rows(*matrix(expected), rows, grad, None, HYPER)
    for name in set(Planes._fields) - set(parts.fields()):
        getattr(expected, name).copy_(getattr(new, name))
    for host in (kernels, TorchKernels()):
        found = elsewhere(num_rows * width, aligned=True)
        for tensor, source in zip(found.planes(), new.planes(), strict=True):
            tensor.copy_(source)
        host.update_rows(*matrix(old), rows, grad, None, HYPER, out=matrix(found), parts=parts)
        assert_same_bits(found, expected)
        assert_same_bits(old, before)


def test_an_overlap_is_refused(kernels: NativeKernels, generator):
    state = State(100, torch.bfloat16, ordinary, generator)
    for host in (kernels, TorchKernels()):
        with pytest.raises(ValueError, match=r"out\.weight overlaps weight"):
            host.update(*state.args(), HYPER, out=Planes(*state.planes()))
