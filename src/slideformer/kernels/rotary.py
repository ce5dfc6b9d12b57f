"""Rotary position embedding of query and key in one pass, in place, in Triton; backward turns the other way.

Both layouts: pairs are (i, i + R/2) (most models) or (2i, 2i + 1) (`interleaved`); dimensions from R on are left
alone. In place because nothing else needs what came before: linear layers and norms do not keep their outputs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

# 24 + 8 heads of 128, bf16: 0.1015 ms with 2 warps, 0.1028 with 4, 0.1023 with 1 (H200, 2026-11-30, tune_kernels.py).
NUM_WARPS = 2


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The specification: x [B, heads, S, D], cos and sin [1 or B, S, R]; returns a new tensor."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        quarter = torch.stack([-b, a], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        quarter = torch.cat([-b, a], dim=-1)
    return torch.cat([turned * cos.unsqueeze(1) + quarter * sin.unsqueeze(1), rest], dim=-1).to(x.dtype)


@triton.jit
def _store(first_at, second_at, a, b, cos, sin, mask):
    tl.store(first_at, (a * cos - b * sin).to(first_at.dtype.element_ty), mask=mask)
    tl.store(second_at, (b * cos + a * sin).to(second_at.dtype.element_ty), mask=mask)


@triton.jit
def _rotary(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_heads,
    k_heads,
    half,
    q_row_stride,
    q_head_stride,
    q_token_stride,
    k_row_stride,
    k_head_stride,
    k_token_stride,
    cos_row_stride,
    cos_token_stride,
    direction,
    INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, HALF)
    mask = i < half
    if INTERLEAVED:
        first = 2 * i
        second = 2 * i + 1
    else:
        first = i
        second = half + i
    q_head = tl.arange(0, Q_HEADS)[:, None]
    k_head = tl.arange(0, K_HEADS)[:, None]
    q_mask = (q_head < q_heads) & mask[None, :]
    k_mask = (k_head < k_heads) & mask[None, :]
    q = q_ptr + row * q_row_stride + token * q_token_stride + q_head * q_head_stride
    k = k_ptr + row * k_row_stride + token * k_token_stride + k_head * k_head_stride
    # All loads come before the first store: none can pass a store, which might be to the same place.
    q_a = tl.load(q + first[None, :], mask=q_mask, other=0.0).to(tl.float32)
    q_b = tl.load(q + second[None, :], mask=q_mask, other=0.0).to(tl.float32)
    k_a = tl.load(k + first[None, :], mask=k_mask, other=0.0).to(tl.float32)
    k_b = tl.load(k + second[None, :], mask=k_mask, other=0.0).to(tl.float32)
    at = row * cos_row_stride + token * cos_token_stride + first
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin = (tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32) * direction)[None, :]
    _store(q + first[None, :], q + second[None, :], q_a, q_b, cos, sin, q_mask)
    _store(k + first[None, :], k + second[None, :], k_a, k_b, cos, sin, k_mask)


def _writable(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy where its last dimension is not dense or its elements share memory."""
    dense = x.stride(-1) == 1 and all(stride > 0 or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if dense else x.contiguous()


_padded = cache(triton.next_power_of_2)


def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float, interleaved: bool
):
    rows, q_heads, length, _ = q.shape
    k_heads, half = k.shape[1], cos.shape[-1] // 2
    _rotary[(length, rows)](
        q,
        k,
        cos,
        sin,
        q_heads,
        k_heads,
        half,
        *q.stride()[:3],
        *k.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        direction,
        INTERLEAVED=interleaved,
        Q_HEADS=_padded(q_heads),
        K_HEADS=_padded(k_heads),
        HALF=_padded(half),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        q, k = _writable(q), _writable(k)
        _launch(q, k, cos, sin, 1.0, interleaved)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return q, k

    @staticmethod
    def backward(ctx, q_grad, k_grad):
        cos, sin = ctx.saved_tensors
        q_grad, k_grad = _writable(q_grad), _writable(k_grad)
        _launch(q_grad, k_grad, cos, sin, -1.0, ctx.interleaved)
        return q_grad, k_grad, None, None, None


def rotary_(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn query and key in place; differentiable. What autograd has saved of them before is overwritten unseen.

    q: [B, heads, S, D], k: [B, kv_heads, S, D], any strides with a dense last dimension (else a copy is turned).
    cos, sin: [1 or B, S, R], R <= D even, dense last dimension, each value given for both members of its pair; no
    gradient. Computed in fp32, rounded once. Backward writes over the gradients it is given.
    Source: Su et al., arXiv 2104.09864, equation 34.
    """
    return _Rotary.apply(q, k, cos, sin, interleaved)
