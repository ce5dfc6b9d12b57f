"""Measures what a plan depends on: how fast this machine updates parameters and multiplies matrices."""

from __future__ import annotations

import time

import torch

from slideformer.device import Device
from slideformer.native import HostKernels
from slideformer.optim import Hyper

UPDATE_NUMEL = 2**24  # 0.23 GB of state and gradient: beyond any cache, and done within a second on a laptop
MATRIX = 4096
MATRIX_PRODUCTS = 8  # ~1.4 ms on an H200
TRIES = 3  # the best counts: whatever else the machine does only ever makes it slower


def update_rate(kernels: HostKernels, numel: int = UPDATE_NUMEL) -> float:
    """Parameters a second through the optimizer, with a bf16 gradient."""
    weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    kernels.split(torch.randn(numel), weight, residual)
    grad = torch.randn(numel).bfloat16()
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    times = []
    for step in range(1, TRIES + 1):
        hyper = Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step, grad_scale=1.0)
        start = time.perf_counter()
        kernels.update(weight, residual, grad, exp_avg, exp_avg_sq, hyper)
        times.append(time.perf_counter() - start)
    return numel / min(times)


def matrix_rate(device: Device) -> float:
    """Floating-point operations a second of a large bf16 matrix product on the device."""
    a, b = (torch.randn(MATRIX, MATRIX, device=device.torch_device).bfloat16() for _ in range(2))
    times = []
    for _ in range(TRIES):
        float((a @ b)[0, 0])  # reading a value waits for the device
        start = time.perf_counter()
        for _ in range(MATRIX_PRODUCTS):
            c = a @ b
        float(c[0, 0])
        times.append(time.perf_counter() - start)
    return MATRIX_PRODUCTS * 2 * MATRIX**3 / min(times)
