"""The state keeps every bit of a master weight, and what is frozen as the plane that is uploaded."""

from __future__ import annotations

import pytest
import torch

from engine.toys import plane_of
from slideformer.device.cpu import CpuDevice
from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.memory import State
from slideformer.memory import state as state_module
from slideformer.native import TorchKernels

AHEAD = pytest.mark.parametrize("ahead", [(), (1,)], ids=["", "with a second copy"])


def layout() -> Layout:
    block = (Param("w", (4, 10)), Param("n", (7,), decay=False), Param("f", (3, 11), trainable=False))
    return Layout(
        (Unit("table", UnitKind.TABLE, (Param("t", (5, 3)),)), Unit("block.0", UnitKind.BLOCK, block)), 16, True
    )


def state(*, keep_residual: bool, ahead: tuple[int, ...] = ()) -> State:
    return State(layout(), CpuDevice(), TorchKernels(), keep_residual=keep_residual, ahead=ahead)


@AHEAD
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_what_is_written_is_read_bit_for_bit_in_any_pieces(piece, ahead, generator, monkeypatch):
    monkeypatch.setattr(state_module, "PIECE_NUMEL", piece)
    held, numel, trained = state(keep_residual=False, ahead=ahead), 80, 47
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-30, 30, (numel,), generator=generator)
    for start, stop in ((0, 20), (20, 60), (60, 80)):
        held.write(1, start, values[start:stop])
    expected = values.clone()
    expected[trained:] = ((values[trained:].view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)
    for start, stop in ((0, 80), (0, 47), (47, 80), (40, 50), (46, 48), (79, 80), (5, 5)):
        assert torch.equal(held.read(1, start, stop), expected[start:stop])


def test_with_residuals_the_frozen_end_is_exact_too(generator):
    held, values = state(keep_residual=True), torch.randn(80, generator=generator)
    held.write(1, 0, values)
    assert torch.equal(held.read(1, 0, 80), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_dtypes_are_written_as_their_fp32_value(dtype, generator):
    held, values = state(keep_residual=True), torch.randn(15, generator=generator).to(dtype)
    held.write(0, 0, values)
    assert torch.equal(held.read(0, 0, 15), values.float())


def test_a_strided_source_is_written_in_its_order(generator):
    held, values = state(keep_residual=True), torch.randn(30, generator=generator)
    held.write(0, 0, values[::2])
    assert torch.equal(held.read(0, 0, 15), values[::2])


@AHEAD
def test_reading_gives_new_memory(ahead):
    held = state(keep_residual=True, ahead=ahead)
    held.read(1, 0, 80).fill_(5.0)
    assert not held.read(1, 0, 80).any()


def test_moments_start_at_zero_and_only_what_is_trained_has_them():
    held = state(keep_residual=False)
    for name in ("exp_avg", "exp_avg_sq", "residual"):
        planes = [plane_of(held, unit, name) for unit in range(2)]
        assert [plane.numel() for plane in planes] == [15, 47]
        assert name == "residual" or not any(plane.any() for plane in planes)


def test_two_copies_hold_the_same_until_an_update_says_otherwise(generator):
    held, values = state(keep_residual=False, ahead=(1,)), torch.randn(80, generator=generator)
    held.write(1, 0, values)
    for twin in held.twins.values():
        assert all(torch.equal(a, b) for a, b in zip(twin.current, twin.other, strict=True))
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(twin.current, twin.other, strict=True) if a.numel())
    read = held.read(1, 0, 80)
    for twin in held.twins.values():
        twin.swap()
    assert torch.equal(held.read(1, 0, 80), read)
