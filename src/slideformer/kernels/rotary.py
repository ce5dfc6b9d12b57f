"""Rotary position embedding of query and key in one pass, in place, in Triton; backward turns the other way.

Both layouts: pairs are (i, i + R/2) (most models) or (2i, 2i + 1) (`interleaved`); dimensions from R on are left
alone. In place because nothing else needs what came before: linear layers and norms do not keep their outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_WARPS = 4


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
def _turn(ptr, heads, head_stride, first, second, cos, sin, mask, HEADS: tl.constexpr):
    head = tl.arange(0, HEADS)[:, None]
    mask = (head < heads) & mask[None, :]
    base = ptr + head * head_stride
    a = tl.load(base + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + second[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(base + first[None, :], (a * cos[None, :] - b * sin[None, :]).to(ptr.dtype.element_ty), mask=mask)
    tl.store(base + second[None, :], (b * cos[None, :] + a * sin[None, :]).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotary(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    length,
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
    row = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    i = tl.arange(0, HALF)
    mask = i < half
    if INTERLEAVED:
        first = 2 * i
        second = 2 * i + 1
    else:
        first = i
        second = half + i
    at = row * cos_row_stride + token * cos_token_stride + first
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32) * direction
    q = q_ptr + row * q_row_stride + token * q_token_stride
    k = k_ptr + row * k_row_stride + token * k_token_stride
    _turn(q, q_heads, q_head_stride, first, second, cos, sin, mask, Q_HEADS)
    _turn(k, k_heads, k_head_stride, first, second, cos, sin, mask, K_HEADS)


def _writable(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy where its last dimension is not dense or its elements share memory."""
    dense = x.stride(-1) == 1 and all(stride > 0 or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if dense else x.contiguous()


def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float, interleaved: bool
):
    rows, q_heads, length, _ = q.shape
    k_heads, half = k.shape[1], cos.shape[-1] // 2
    _rotary[(rows * length,)](
        q,
        k,
        cos,
        sin,
        length,
        q_heads,
        k_heads,
        half,
        *q.stride()[:3],
        *k.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        direction,
        INTERLEAVED=interleaved,
        Q_HEADS=triton.next_power_of_2(q_heads),
        K_HEADS=triton.next_power_of_2(k_heads),
        HALF=triton.next_power_of_2(half),
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
