"""Gated linear units, activation(gate) * up, in Triton: SiLU (SwiGLU) and tanh-GELU (GeGLU).

Forward keeps its inputs; backward computes the activation again and writes the gradients over them, so that the
widest tensors of a block exist once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

# Elements of a program. Rows of 8,192: forward 0.140 ms and backward 0.243 with 8192 and 16 warps, 0.145 and 0.246 with
# 4096 and 8; rows of 12,288, which leave half a block of 8192 idle, 0.145 and 0.246 with 4096 (H200, 2026-11-30,
# benchmarks/tune_kernels.py).
MAX_BLOCK = 8192
WHOLE_BLOCK = 4096  # where rows are no multiple of MAX_BLOCK
WARP_NUMEL = 512
ACTIVATIONS = ("silu", "gelu_tanh")


def reference(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
    """The specification, in the inputs' dtype."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@triton.jit
def _activation(x, SILU: tl.constexpr):
    """activation(x) and its derivative; x in fp32."""
    if SILU:
        s = 1.0 / (1.0 + tl.exp(-x))
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    else:
        # 0.5 x (1 + tanh(y)), y = sqrt(2 / pi) (x + 0.044715 x^3); tanh through exp of a non-positive number
        y = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        e = tl.exp(-2.0 * tl.abs(y))
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(y < 0, -t, t)
        # 1 - t^2 without the cancellation where t is near 1
        rest = 4.0 * e / ((1.0 + e) * (1.0 + e))
        value = 0.5 * x * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * x * rest * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return value, slope


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, num_columns, gate_stride, up_stride, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activation(gate, SILU)
    tl.store(out_ptr + row * num_columns + at, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(grad_ptr, gate_ptr, up_ptr, num_columns, gate_stride, up_stride, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients for gate and up, over them."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_columns
    dtype = gate_ptr.dtype.element_ty
    grad = tl.load(grad_ptr + row * num_columns + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation(gate, SILU)
    tl.store(gate_ptr + row * gate_stride + at, (grad * up * slope).to(dtype), mask=mask)
    tl.store(up_ptr + row * up_stride + at, (grad * value).to(dtype), mask=mask)


@cache
def _sizes(width: int) -> tuple[int, dict[str, int]]:
    """Programs of a row, and what each is."""
    block = min(triton.next_power_of_2(width), WHOLE_BLOCK if width % MAX_BLOCK else MAX_BLOCK)
    return triton.cdiv(width, block), {"BLOCK": block, "num_warps": max(block // WARP_NUMEL, 4)}


def _run_forward(gate: torch.Tensor, up: torch.Tensor, silu: bool) -> torch.Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    programs, sizes = _sizes(width)
    _forward[gate.numel() // width, programs](
        gate,
        up,
        out,
        width,
        gate.stride(-2),
        up.stride(-2),
        SILU=silu,
        **sizes,
        enable_fp_fusion=True,
    )
    return out


def _run_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, silu: bool) -> None:
    width = gate.shape[-1]
    programs, sizes = _sizes(width)
    _backward[gate.numel() // width, programs](
        grad.contiguous(),
        gate,
        up,
        width,
        gate.stride(-2),
        up.stride(-2),
        SILU=silu,
        **sizes,
        enable_fp_fusion=True,
    )


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, silu):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.silu = silu
        return _run_forward(gate, up, silu)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        _run_backward(grad, gate, up, ctx.silu)
        return gate, up, None


class _GluOfHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both, silu):
        both = both.contiguous()
        ctx.save_for_backward(both)
        ctx.silu = silu
        return _run_forward(*both.chunk(2, dim=-1), silu)

    @staticmethod
    def backward(ctx, grad):
        (both,) = ctx.saved_tensors
        _run_backward(grad, *both.chunk(2, dim=-1), ctx.silu)
        return both, None


def glu(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
    """activation(gate) * up; differentiable once. Backward writes the gradients over gate and up.

    gate, up: [..., I], bf16, fp16 or fp32, on a GPU, of which nobody else may need the values after backward.
    activation: one of ACTIVATIONS. Computed in fp32, rounded once.
    Source: Shazeer, arXiv 2002.05202.
    """
    return _Glu.apply(gate, up, activation == "silu")


def glu_of_halves(both: torch.Tensor, *, activation: str) -> torch.Tensor:
    """`glu` of the first and the second half of the last dimension. both: [..., 2 I], [..., I] comes back."""
    return _GluOfHalves.apply(both, activation == "silu")
