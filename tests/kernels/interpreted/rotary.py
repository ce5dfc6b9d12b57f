"""Rotary embedding of query and key against float64 (kernels/elementwise.py has the bounds)."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import check_rotary

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
LAYOUT = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@DTYPE
@LAYOUT
@pytest.mark.parametrize("sequence_first", [True, False], ids=["", "heads first"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"), [((2, 4, 2, 3, 16), 16), ((1, 3, 1, 4, 24), 24), ((2, 5, 5, 2, 20), 6)], ids=str
)
def test_values_and_gradients_are_within_rounding_of_float64(shape, rotary_dim, sequence_first, interleaved, dtype):
    check_rotary(dtype, shape, "cpu", interleaved=interleaved, rotary_dim=rotary_dim, sequence_first=sequence_first)


@LAYOUT
def test_every_row_may_have_positions_of_its_own(interleaved):
    check_rotary(torch.float32, (3, 4, 2, 2, 16), "cpu", interleaved=interleaved, rotary_dim=16, rows_of_cos=3)
