"""Measures what a plan depends on: how fast this machine updates parameters, gathers and copies."""

from __future__ import annotations

import time

import torch

from slideformer.device import Device
from slideformer.native import HostKernels
from slideformer.optim import Hyper

UPDATE_NUMEL = 2**24  # 0.23 GB of state and gradient: beyond any cache, and done within a second on a laptop
GATHER_ROWS, GATHER_WIDTH = 1 << 15, 2048  # 134 MB, of which a quarter is gathered
LINK_NBYTES = 1 << 26
COPY_NBYTES = 1 << 28
DUPLEX = (
    0.91  # of one direction's rate is left when both are busy: 50.6 of 55.3 and 48.7 of 53.6 GB/s (two H200 machines)
)
UPDATED_S = 0.2  # of updates that are timed together
TRIES = 3  # the best counts: whatever else the machine does only ever makes it slower


def update_rate(kernels: HostKernels, numel: int = UPDATE_NUMEL) -> float:
    """Parameters a second through the optimizer, with a bf16 gradient, when it works on and on."""
    weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    kernels.split(torch.randn(numel), weight, residual)
    grad = torch.randn(numel).bfloat16()
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    start, step = 0.0, 0
    while step < TRIES or time.perf_counter() - start < UPDATED_S:
        if step == 1:  # the first has touched the memory
            start = time.perf_counter()
        step += 1
        hyper = Hyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step, grad_scale=1.0)
        kernels.update(weight, residual, grad, exp_avg, exp_avg_sq, hyper)
    return (step - 1) * numel / (time.perf_counter() - start)


def gather_rate(kernels: HostKernels) -> float:
    """Bytes a second of rows gathered on the host, from anywhere in a table."""
    table = torch.zeros(GATHER_ROWS, GATHER_WIDTH, dtype=torch.bfloat16)
    rows = torch.randperm(GATHER_ROWS)[: GATHER_ROWS // 4].sort().values
    out = torch.zeros(rows.numel(), GATHER_WIDTH, dtype=torch.bfloat16)
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        kernels.gather_rows(table, rows, out)
        times.append(time.perf_counter() - start)
    return out.nbytes / min(times)


def link_rate(device: Device) -> float:
    """Bytes a second to the device while as much comes back."""
    staged = device.stage(torch.zeros(LINK_NBYTES, dtype=torch.uint8))
    there = torch.empty(LINK_NBYTES, dtype=torch.uint8, device=device.torch_device)
    return DUPLEX * LINK_NBYTES / device.measure(lambda: there.copy_(staged, non_blocking=True)).seconds


def device_rate(device: Device) -> float:
    """Bytes a second that the device's memory moves, reads and writes counted."""
    source = torch.zeros(COPY_NBYTES, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * COPY_NBYTES / device.measure(lambda: target.copy_(source)).seconds
