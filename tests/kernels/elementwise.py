"""Checks of the elementwise kernels against their specifications in float64, for any device and dtype.

The interpreter runs them on the CPU (tests/kernels/interpreted), a GPU at full size and in bf16 too (tests/gpu).
Tolerances: u = 2**-24 is one rounding to fp32, `half_ulp` one to the result's dtype. A sum of k terms whose longest
chain of additions is d long is off by at most d u times the sum of absolute values (Higham, Accuracy and Stability,
chapter 4); a tile's sums have chains far below DEPTH: 4,096 elements on 256 threads are 16 + 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slideformer.kernels import glu as glu_kernels
from slideformer.kernels import rms_norm as norm_kernels
from slideformer.kernels import rotary as rotary_kernels

U = 2.0**-24
DEPTH = 64
HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Where numbers are too small for relative rounding: the distance between two of them, so twice a rounding.
LEAST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}

# (offset, round_first) of Llama, Gemma and OLMo 2
CONVENTIONS = {"llama": (0.0, True), "gemma": (1.0, False), "olmo2": (0.0, False)}


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def assert_within(name: str, found: Tensor, exact: Tensor, bound: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype, name
    error = (found.double() - exact).abs()
    allowed = bound + HALF_ULP[dtype] * (exact.abs() + bound) + LEAST[dtype]
    worst = (error / allowed).max()
    assert bool((error <= allowed).all()), f"{name} is off by {float(worst):.2f} of the bound"


def check_rms_norm(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str,
    *,
    convention: str,
    adds: bool,
    scale: float = 1.0,
    overwrite_grad: bool = False,
) -> None:
    """Sum, output and all gradients. adds: with a residual, and a gradient for the sum from elsewhere."""
    offset, round_first = CONVENTIONS[convention]
    numbers = {"eps": 1e-6, "offset": offset, "round_first": round_first}
    x, add = randn(shape, dtype, 0, device, scale), randn(shape, dtype, 1, device, scale)
    for values in (x, add):  # a quarter of the columns is so small that fp16 has no normal numbers for their norm
        values[..., 1::4] *= 2.0**-14
    weight = randn(shape[-1:], dtype, 2, device) + (1 - offset)
    grad, total_grad = randn(shape, dtype, 3, device), randn(shape, dtype, 4, device)
    leaves = [t.clone().requires_grad_() for t in (x, add, weight)]
    given = grad.clone()
    if adds:
        total, out = norm_kernels.add_rms_norm(*leaves, **numbers, overwrite_grad=overwrite_grad)
        assert torch.equal(total, (x.float() + add.float()).to(dtype))
        x_grad, add_grad, weight_grad = torch.autograd.grad([total, out], leaves, [total_grad, given])
        assert torch.equal(x_grad, add_grad)
    else:
        total, out = x, norm_kernels.rms_norm(leaves[0], leaves[2], **numbers, overwrite_grad=overwrite_grad)
        x_grad, weight_grad = torch.autograd.grad(out, [leaves[0], leaves[2]], given)
    assert overwrite_grad or torch.equal(given, grad)
    wide, wide_weight = total.detach().double().requires_grad_(), weight.double().requires_grad_()
    exact = norm_kernels.reference(wide, wide_weight, **numbers)
    exact_grads = torch.autograd.grad(exact, [wide, wide_weight], grad.double())
    exact_x_grad = exact_grads[0] + (total_grad.double() if adds else 0.0)

    # rstd: half the sum's error, and a few roundings. Then one product each for the norm and the weight.
    relative = (DEPTH / 2 + 8) * U
    # Llama's early rounding, of the norm, before it meets the weight or the gradient.
    first, first_least = (HALF_ULP[dtype], LEAST[dtype] / 2) if round_first else (0.0, 0.0)
    with torch.no_grad():
        early = first_least * (wide_weight + offset).abs()
        assert_within("output", out, exact, (relative + first) * exact.abs() + early, dtype)
        rstd = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        normed, weighted = wide * rstd, grad.double() * (wide_weight + offset)
        inside = (weighted * normed).abs().mean(-1, keepdim=True)  # bounds the mean's error as the sum bounds a sum's
        x_bound = 4 * relative * rstd * (weighted.abs() + normed.abs() * inside) + 2 * U * exact_x_grad.abs()
        assert_within("gradient for x", x_grad, exact_x_grad, x_bound, dtype)
        terms = (grad.double() * normed).abs().flatten(0, -2)
        chain = min(terms.shape[0], 1024) + DEPTH
        weight_bound = (chain * U + first) * terms.sum(0) + first_least * grad.double().abs().flatten(0, -2).sum(0)
        assert_within("gradient for the weight", weight_grad, exact_grads[1], weight_bound, dtype)


def check_rotary(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    device: str,
    *,
    interleaved: bool,
    rotary_dim: int,
    sequence_first: bool = True,
    rows_of_cos: int = 1,
) -> None:
    """shape: rows, query heads, key heads, tokens, head size. sequence_first: as linear layers leave heads."""
    rows, q_heads, k_heads, length, size = shape

    def heads(count: int, seed: int) -> Tensor:
        if sequence_first:
            return randn((rows, length, count, size), dtype, seed, device).transpose(1, 2)
        return randn((rows, count, length, size), dtype, seed, device)

    angle = randn((rows_of_cos, length, rotary_dim // 2), torch.float32, 5, device, 20.0)
    angle = angle.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angle, angle], dim=-1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    given = [heads(q_heads, 0), heads(k_heads, 1)]
    grads = [heads(q_heads, 2), heads(k_heads, 3)]
    leaves = [t.clone().requires_grad_() for t in given]
    q, k = rotary_kernels.rotary_(*(leaf + 0 for leaf in leaves), cos, sin, interleaved=interleaved)
    found = torch.autograd.grad([q, k], leaves, [g.clone() for g in grads])
    for name, value, out, grad, grad_found in zip("qk", given, (q, k), grads, found, strict=True):
        wide = value.double().requires_grad_()
        exact = rotary_kernels.reference(wide, cos.double(), sin.double(), interleaved=interleaved)
        (exact_grad,) = torch.autograd.grad(exact, wide, grad.double())
        with torch.no_grad():  # two products and a sum: no more than 3 roundings of the two terms, each at most |pair|
            for what, result, expected, of in (
                ("", out, exact, value),
                ("gradient for ", grad_found, exact_grad, grad),
            ):
                pair = rotary_kernels.reference(
                    of.double().abs(), cos.abs().double(), 0 * sin.double(), interleaved=interleaved
                )
                other = rotary_kernels.reference(
                    of.double().abs(), 0 * cos.double(), sin.abs().double(), interleaved=interleaved
                )
                assert_within(f"{what}{name}", result, expected, 3 * U * (pair.abs() + other.abs()), dtype)
                assert torch.equal(result[..., rotary_dim:], of[..., rotary_dim:])


def check_glu(
    dtype: torch.dtype, shape: tuple[int, ...], device: str, *, activation: str, halves: bool, scale: float = 1.0
) -> None:
    """Output and gradients; halves: gate and up in one tensor."""
    gate, up, grad = (randn(shape, dtype, seed, device, scale) for seed in (0, 1, 2))
    if halves:
        both = torch.cat([gate, up], dim=-1).requires_grad_()
        out = glu_kernels.glu_of_halves(both + 0, activation=activation)
        found = torch.autograd.grad(out, both, grad)[0].chunk(2, dim=-1)
    else:
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        out = glu_kernels.glu(leaves[0] + 0, leaves[1] + 0, activation=activation)
        found = torch.autograd.grad(out, leaves, grad)
    wide = [gate.double().requires_grad_(), up.double().requires_grad_()]
    exact = glu_kernels.reference(*wide, activation=activation)
    exact_grads = torch.autograd.grad(exact, wide, grad.double())
    with torch.no_grad():
        x, u, g = (t.double() for t in (gate, up, grad))
        # exp of an fp32 argument z is off by |z| u for the argument's rounding and by 2 u for itself; a few more
        # operations follow. Errors of 1 + tanh are absolute, those of the sigmoid are relative, until it is 0: where
        # exp(-x) overflows.
        if activation == "silu":
            s = torch.sigmoid(x)
            value, value_error = x * s, (x * s).abs() * (2 * x.abs() + 12) * U + x.abs() * 2.0**-126
            slope_error = (1 + x.abs()) * (s * (4 * x.abs() + 24) * U + 2.0**-126)
        else:
            y = 0.7978845608028654 * (x + 0.044715 * x**3)
            error = (4 * y.abs().clamp(max=50) + 16) * U
            value, value_error = torch.nn.functional.gelu(x, approximate="tanh"), x.abs() * error
            slope_error = error * (1 + x.abs() * 0.8 * (1 + 0.134145 * x**2) * torch.exp(-2 * y.abs()).clamp(min=U))
        assert_within("output", out, exact, value_error * u.abs() + 2 * U * exact.abs(), dtype)
        assert_within("gradient for gate", found[0], exact_grads[0], (g * u).abs() * (slope_error + 4 * U), dtype)
        assert_within("gradient for up", found[1], exact_grads[1], g.abs() * (value_error + 2 * U * value.abs()), dtype)
