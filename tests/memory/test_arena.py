"""Arenas: exact sizes, cache lines, and a sentence where the kernel refuses."""

from __future__ import annotations

import pytest
import torch

from slideformer.errors import DoesNotFit
from slideformer.memory import Arena


def test_an_arena_asks_for_exactly_what_it_holds(mapped):
    sizes = [(100, torch.bfloat16), (1, torch.float32), (0, torch.float32), (64, torch.uint8), (65, torch.uint8)]
    arena = Arena.of(sizes, "test")
    assert mapped == [arena.nbytes] == [256 + 64 + 0 + 64 + 128]
    taken = [arena.take(*one) for one in sizes]
    for tensor, (numel, dtype) in zip(taken, sizes, strict=True):
        assert tensor.shape == (numel,) and tensor.dtype == dtype
        assert tensor.data_ptr() % 64 == 0 or numel == 0
        assert not tensor.any()
    for value, tensor in enumerate(taken):
        tensor.fill_(value + 1)
    assert all((tensor == value + 1).all() for value, tensor in enumerate(taken))
    with pytest.raises(AssertionError, match="arena test holds 512 bytes, 512 are used, 1 asked"):
        arena.take(1, torch.uint8)


def test_an_empty_arena_asks_for_nothing(mapped):
    arena = Arena.of([], "test")
    assert mapped == [] and arena.nbytes == 0


def test_what_the_kernel_refuses_is_said_in_one_sentence():
    with pytest.raises(DoesNotFit, match=r"the host refused 4294967296\.00 GiB for weights \(.*\): free memory"):
        Arena(1 << 62, "weights")
