"""AdamW on a tile of the split master weight: the definition that every other implementation must equal bit for bit.

The fp32 master weight is kept as two 16-bit planes, a bf16 `weight` (the master rounded to nearest, ties away from
zero) and an int16 `residual` (the rest). One idea makes the result the same on every machine: magnitudes below 2**-125,
twice the smallest normal number, count as zero after every operation. So it does not matter whether the hardware
flushes denormals, nor whether it decides that before or after rounding (x86 and Arm differ there).
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

FLUSH_BELOW = 2.0**-125


@dataclass(frozen=True, slots=True)
class Hyper:
    """The numbers of one AdamW step. step counts from 1 (bias correction); grad_scale multiplies every gradient."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (("lr", self.lr >= 0), ("eps", self.eps >= 0), ("weight_decay", self.weight_decay >= 0)):
            if not allowed:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 or more")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} is {beta}, must be at least 0 and less than 1")
        if self.lr * self.weight_decay > 1:
            found = f"lr * weight_decay is {self.lr * self.weight_decay:g}"
            raise ValueError(f"{found}, must be at most 1: more would turn weights round")
        if self.step < 1:
            raise ValueError(f"step is {self.step}, must be at least 1: the first update is step 1")

    def scalars(self) -> Scalars:
        """The factors of the update: each computed in double, then rounded once to fp32."""
        bias1, bias2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        return Scalars(
            grad_scale=_fp32(self.grad_scale),
            beta1=_fp32(self.beta1),
            one_minus_beta1=_fp32(1 - self.beta1),
            beta2=_fp32(self.beta2),
            one_minus_beta2=_fp32(1 - self.beta2),
            rsqrt_bias2=_fp32(1 / sqrt(bias2)),
            eps=_fp32(self.eps),
            decay=_fp32(1 - self.lr * self.weight_decay),
            step_size=_fp32(self.lr / bias1),
        )


@dataclass(frozen=True, slots=True)
class Scalars:
    """What the update multiplies, divides and adds; every value is exactly an fp32 number."""

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    rsqrt_bias2: float
    eps: float
    decay: float
    step_size: float


def reference_update(
    weight: Tensor, residual: Tensor, grad: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Hyper
) -> None:
    """Apply one AdamW step to a tile, in place. The specification; native kernels equal it bit for bit.

    weight: bf16 plane, residual: int16 plane, exp_avg, exp_avg_sq: fp32, all of one shape, on any one device.
    grad: bf16 or fp32 of that shape, or None for a gradient of zero (whatever grad_scale is).
    Every multiplication, addition, division and square root is rounded to fp32 on its own; magnitudes below 2**-125
    count as zero (keeping their sign) wherever they are read or computed; a NaN is stored as 0x7FC00000.
    Source: Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, in the order of torch.optim.AdamW.
    """
    s = hyper.scalars()
    g = torch.zeros_like(exp_avg) if grad is None else _flush(_flush(grad.float()) * s.grad_scale)
    # Moments and master are flushed by their first factor, which is between 0 and 1; only grad_scale may be larger.
    m = _flush(_flush(exp_avg * s.beta1) + _flush(g * s.one_minus_beta1))
    v = _flush(_flush(exp_avg_sq * s.beta2) + _flush(_flush(g * s.one_minus_beta2) * g))
    denom = _sqrt(v) * s.rsqrt_bias2 + s.eps
    p = _flush(join(weight, residual) * s.decay)
    p = _flush(p - _flush(_flush(m / denom) * s.step_size))
    exp_avg.copy_(_one_nan(m))
    exp_avg_sq.copy_(_one_nan(v))
    split(_one_nan(p), weight, residual)


def reference_update_rows(
    weight: Tensor,
    residual: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grad: Tensor | None,
    grad_rows: Tensor | None,
    hyper: Hyper,
) -> None:
    """Apply `reference_update` to the rows `rows` of [V, H] planes and moments, in place.

    rows: int64 [n], distinct. grad: bf16 or fp32 [k, H] or None (zero). Row rows[i] takes gradient row grad_rows[i],
    or none (zero) where that is negative; grad_rows None means row i.
    """
    picked = [plane[rows] for plane in (weight, residual, exp_avg, exp_avg_sq)]
    if grad is None or grad_rows is None:
        reference_update(*picked[:2], grad, *picked[2:], hyper)
    else:
        for has_grad in (True, False):
            mine = (grad_rows >= 0) == has_grad
            part = [plane[mine] for plane in picked]
            reference_update(*part[:2], grad[grad_rows[mine]] if has_grad else None, *part[2:], hyper)
            for plane, values in zip(picked, part, strict=True):
                plane[mine] = values
    for plane, values in zip((weight, residual, exp_avg, exp_avg_sq), picked, strict=True):
        plane[rows] = values


def split(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Write an fp32 master into its bf16 plane `weight` and int16 plane `residual`, same shape and device.

    `join` gives back all 2**32 bit patterns. The bf16 plane alone is wrong for some NaN patterns (not for 0x7FC00000).
    """
    bits = master.view(torch.int32)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    residual.copy_(bits << 16 >> 16)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 master of a bf16 plane and an int16 plane, as a new tensor."""
    return ((weight.view(torch.int16).int() << 16) + residual).view(torch.float32)


def _flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < FLUSH_BELOW, x * 0, x)


def _sqrt(x: Tensor) -> Tensor:
    # torch.sqrt goes through MKL on the CPU, which is an ulp off now and then (6 in 1000). In fp64 an ulp, 2**-52, does
    # not matter: the root of a 24-bit number is at least 2**-50 away from where rounding to fp32 turns.
    return x.double().sqrt().float()


def _one_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32, device=x.device).view(torch.float32), x)


def _fp32(value: float) -> float:
    rounded = c_float(value).value
    return 0.0 if abs(rounded) < FLUSH_BELOW else rounded
