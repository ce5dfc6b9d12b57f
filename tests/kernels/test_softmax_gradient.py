"""The Triton kernel, through Triton's interpreter on the CPU, against its reference in torch and against float64.

In a process of its own: the interpreter is chosen when the kernel's module is imported. fp32 and fp16 only; the
interpreter's bf16 truncates where the hardware rounds (tests/gpu has bf16 on a GPU).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHECK = """
import sys, torch
from slideformer.kernels.softmax_gradient import softmax_gradient_

dtype = getattr(torch, sys.argv[1])
for rows, columns, scale, cap in {cases}:
    generator = torch.Generator().manual_seed(rows * columns)
    z = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
    z[0] = 60.0  # equal and large
    z[-1, 0] = -60.0 if dtype is torch.float16 else -1e30  # far below all others
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[0] = columns - 1
    factor = 1 / 7

    exact = z.double().requires_grad_()
    logits = exact * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (grad,) = torch.autograd.grad(losses.sum() * factor, exact)

    found = z.clone()
    found_losses = softmax_gradient_(found, labels, scale=scale, softcap=cap or None, factor=factor)

    # fp32 inside: exponents carry the error of their argument, up to ~60 units of 2**-23 each, and a sum over the
    # columns adds log2(columns) roundings; the result is rounded once to its dtype.
    tolerance = 2.0**-23 * (4 * 64 + columns.bit_length())
    far = (found_losses.double() - losses.detach()).abs() > tolerance * (1 + logits.detach().abs().amax(1))
    assert not far.any(), (rows, columns, found_losses, losses)
    half_ulp, least = (2.0**-24, 0.0) if dtype is torch.float32 else (2.0**-11, 2.0**-25)
    bound = factor * scale * tolerance + grad.abs() * (half_ulp + tolerance) + least
    wrong = ((found.double() - grad).abs() > bound).nonzero()
    assert len(wrong) == 0, (rows, columns, len(wrong), wrong[0].tolist())
"""

CASES = [(5, 123, 1.0, 0.0), (3, 16384, 1.0, 0.0), (2, 16385, 1.0, 0.0), (4, 40001, 0.125, 0.0), (5, 307, 1.0, 30.0)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_loss_and_gradient_are_within_a_derived_bound_of_float64(dtype):
    done = subprocess.run(
        [sys.executable, "-c", CHECK.replace("{cases}", repr(CASES)), dtype],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
