"""Cross entropy and its gradient for z, in place over a chunk of logits: z is read twice and written once.

In torch the same takes ~44 bytes of traffic per logit through fp32 temporaries; here it is 6 (bf16). One program per
row; maximum and sum of exponentials are kept online in fp32. Where the vocabulary comes in slices, the same in two
kernels: one that carries maximum and sum from slice to slice, one that makes the gradient when the whole sum is known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_BLOCK = 16384
NUM_WARPS = 16


@triton.jit
def _logits(z, scale, softcap, HAS_CAP: tl.constexpr):
    x = z.to(tl.float32) * scale
    if HAS_CAP:
        # tanh through exp of a non-positive number, so that it cannot overflow
        y = x / softcap
        e = tl.exp(-2.0 * tl.abs(y))
        t = (1.0 - e) / (1.0 + e)
        x = softcap * tl.where(y < 0, -t, t)
    return x


@triton.jit
def _softmax_gradient(
    z_ptr, label_ptr, loss_ptr, num_columns, scale, softcap, factor, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * num_columns
    label = tl.load(label_ptr + row)
    columns = tl.arange(0, BLOCK)
    maximum = -float("inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        at = start + columns
        x = _logits(tl.load(z_ptr + at, mask=at < num_columns, other=0.0), scale, softcap, HAS_CAP)
        x = tl.where(at < num_columns, x, -float("inf"))
        new = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - new) + tl.sum(tl.exp(x - new), axis=0)
        maximum = new
    log_sum = maximum + tl.log(total)
    picked = _logits(tl.load(z_ptr + label), scale, softcap, HAS_CAP)
    tl.store(loss_ptr + row, log_sum - picked)
    for start in range(0, num_columns, BLOCK):
        at = start + columns
        x = _logits(tl.load(z_ptr + at, mask=at < num_columns, other=0.0), scale, softcap, HAS_CAP)
        grad = (tl.exp(x - log_sum) - tl.where(at == label, 1.0, 0.0)) * factor
        if HAS_CAP:
            grad = grad * (1.0 - (x / softcap) * (x / softcap))
        tl.store(z_ptr + at, (grad * scale).to(z_ptr.dtype.element_ty), mask=at < num_columns)


@triton.jit
def _softmax_sums(
    z_ptr,
    label_ptr,
    maximum_ptr,
    total_ptr,
    picked_ptr,
    num_columns,
    first_column,
    scale,
    softcap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * num_columns
    columns = tl.arange(0, BLOCK)
    maximum = tl.load(maximum_ptr + row)
    total = tl.load(total_ptr + row)
    for start in range(0, num_columns, BLOCK):
        at = start + columns
        x = _logits(tl.load(z_ptr + at, mask=at < num_columns, other=0.0), scale, softcap, HAS_CAP)
        x = tl.where(at < num_columns, x, -float("inf"))
        new = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - new) + tl.sum(tl.exp(x - new), axis=0)
        maximum = new
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    label = tl.load(label_ptr + row) - first_column
    here = (label >= 0) & (label < num_columns)
    picked = _logits(tl.load(z_ptr + label, mask=here, other=0.0), scale, softcap, HAS_CAP)
    tl.store(picked_ptr + row, picked, mask=here)


@triton.jit
def _gradient_of_slice(
    z_ptr,
    label_ptr,
    log_sum_ptr,
    num_columns,
    first_column,
    scale,
    softcap,
    factor,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * num_columns
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row) - first_column
    log_sum = tl.load(log_sum_ptr + row)
    x = _logits(tl.load(z_ptr + columns, mask=columns < num_columns, other=0.0), scale, softcap, HAS_CAP)
    grad = (tl.exp(x - log_sum) - tl.where(columns == label, 1.0, 0.0)) * factor
    if HAS_CAP:
        grad = grad * (1.0 - (x / softcap) * (x / softcap))
    tl.store(z_ptr + columns, (grad * scale).to(z_ptr.dtype.element_ty), mask=columns < num_columns)


def softmax_gradient_(
    z: torch.Tensor, labels: torch.Tensor, *, scale: float, softcap: float | None, factor: float
) -> torch.Tensor:
    """Overwrite z with the gradient of factor * sum of cross entropies; returns the cross entropies.

    z [n, V], contiguous, on a GPU; labels int64 [n], all valid; logits are softcap(scale * z). Returns fp32 [n].
    """
    num_rows, num_columns = z.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=z.device)
    block = min(triton.next_power_of_2(num_columns), MAX_BLOCK)
    if num_rows:
        _softmax_gradient[(num_rows,)](
            z,
            labels,
            losses,
            num_columns,
            scale,
            softcap or 1.0,
            factor,
            HAS_CAP=softcap is not None,
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return losses


def add_softmax_sums_(
    z: torch.Tensor,
    labels: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    picked: torch.Tensor,
    *,
    first_column: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Take a slice of the vocabulary into each row's sum of exponentials, total * exp(maximum).

    z [n, Vs], contiguous, on a GPU, left as it is; its columns are first_column and on. labels int64 [n]. maximum (-inf
    before the first slice), total (0 before it), picked (the label's logit, written by its own slice): fp32 [n].
    """
    num_rows, num_columns = z.shape
    if num_rows and num_columns:
        _softmax_sums[(num_rows,)](
            z,
            labels,
            maximum,
            total,
            picked,
            num_columns,
            first_column,
            scale,
            softcap or 1.0,
            HAS_CAP=softcap is not None,
            BLOCK=min(triton.next_power_of_2(num_columns), MAX_BLOCK),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def gradient_of_slice_(
    z: torch.Tensor,
    labels: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    first_column: int,
    scale: float,
    softcap: float | None,
    factor: float,
) -> None:
    """Overwrite a slice's z with factor times the gradient of the cross entropies. log_sum: fp32 [n], of all slices;
    the rest as in `add_softmax_sums_`."""
    num_rows, num_columns = z.shape
    if num_rows and num_columns:
        block = min(triton.next_power_of_2(num_columns), MAX_BLOCK)
        _gradient_of_slice[(num_rows, triton.cdiv(num_columns, block))](
            z,
            labels,
            log_sum,
            num_columns,
            first_column,
            scale,
            softcap or 1.0,
            factor,
            HAS_CAP=softcap is not None,
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
