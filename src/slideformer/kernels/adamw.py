"""AdamW on the split planes, in Triton: bit for bit `slideformer.optim.reference_update`, where state lies on a GPU.

One program a block of elements; 26 bytes of traffic an element with a bf16 gradient. One idea makes it equal: 16-bit
values pass as integers and are widened by shifts, every operation is rounded on its own (no fusion of a product and a
sum; division and root correctly rounded), and flushing and the one NaN are done on the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slideformer.optim import Hyper

# 8 elements a thread: 16-byte accesses to the 2-byte planes, two of them to the moments.
BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _flush(x):
    """Magnitudes below 2**-125 (exponent field 0 or 1) become zero and keep their sign."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7F000000) == 0, bits & -0x80000000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _one_nan_bits(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@triton.jit(do_not_specialize=["decay_numel"])
def _adamw(
    weight_ptr,  # int16: the bf16 plane's bits
    residual_ptr,  # int16
    grad_ptr,  # int16 (a bf16's bits), fp32, or unused
    exp_avg_ptr,
    exp_avg_sq_ptr,
    scale_ptr,  # fp32, one element; unused unless SCALE_ON_DEVICE
    numel,
    decay_numel,
    grad_scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    rsqrt_bias2,
    eps,
    decay,
    step_size,
    HAS_GRAD: tl.constexpr,
    GRAD_IS_BF16: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    w = tl.load(weight_ptr + at, mask=mask, other=0).to(tl.int32)
    r = tl.load(residual_ptr + at, mask=mask, other=0).to(tl.int32)
    m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0)
    g = tl.zeros([BLOCK], tl.float32)
    if HAS_GRAD:
        if SCALE_ON_DEVICE:
            grad_scale = _flush(tl.load(scale_ptr))
        g = tl.load(grad_ptr + at, mask=mask, other=0)
        if GRAD_IS_BF16:
            g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        g = _flush(_flush(g) * grad_scale)
    m = _flush(_flush(m * beta1) + _flush(g * one_minus_beta1))
    v = _flush(_flush(v * beta2) + _flush(_flush(g * one_minus_beta2) * g))
    denom = tl.sqrt_rn(v) * rsqrt_bias2 + eps
    p = ((w << 16) + r).to(tl.float32, bitcast=True)
    p = _flush(p * tl.where(at < decay_numel, decay, 1.0))
    p = _flush(p - _flush(_flush(tl.div_rn(m, denom)) * step_size))
    bits = _one_nan_bits(p)
    tl.store(exp_avg_ptr + at, _one_nan_bits(m).to(tl.float32, bitcast=True), mask=mask)
    tl.store(exp_avg_sq_ptr + at, _one_nan_bits(v).to(tl.float32, bitcast=True), mask=mask)
    tl.store(weight_ptr + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
    tl.store(residual_ptr + at, bits.to(tl.int16), mask=mask)


def adamw_(
    weight: torch.Tensor,
    residual: torch.Tensor,
    grad: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    hyper: Hyper,
    *,
    decay_numel: int,
    grad_scale: torch.Tensor | None,
) -> None:
    """What `slideformer.kernels.device_update.update_` does, for tensors on a GPU; arguments are checked there."""
    numel = weight.numel()
    if numel == 0:
        return
    s = hyper.scalars()
    as_bits = grad is not None and grad.dtype is torch.bfloat16
    _adamw[(triton.cdiv(numel, BLOCK),)](
        weight.view(torch.int16),
        residual,
        exp_avg if grad is None else grad.view(torch.int16) if as_bits else grad,
        exp_avg,
        exp_avg_sq,
        exp_avg if grad_scale is None else grad_scale,
        numel,
        decay_numel,
        s.grad_scale,
        s.beta1,
        s.one_minus_beta1,
        s.beta2,
        s.one_minus_beta2,
        s.rsqrt_bias2,
        s.eps,
        s.decay,
        s.step_size,
        HAS_GRAD=grad is not None,
        GRAD_IS_BF16=as_bits,
        SCALE_ON_DEVICE=grad_scale is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # a * b + c in one rounding would differ from the host's
    )
