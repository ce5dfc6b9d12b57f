"""Measures what bounds a step on this machine: the optimizer's rate and the link to the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from slideformer.device import Device
from slideformer.native import HostKernels
from slideformer.optim import Hyper

UPDATE_NUMEL = 2**24  # 0.23 GB of state and gradient: beyond any cache, and done within a second on a laptop
COPY_NBYTES = 2**28
PAGE_LOCK_NBYTES = 2**30
TRIES = 3  # the best counts: whatever else the machine does only ever makes it slower


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second to the device, from it, and each way when both run at once. page_locked: of the host's memory."""

    upload: float
    download: float
    both: float
    page_locked: bool


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


def link_speed(device: Device, nbytes: int = COPY_NBYTES) -> Link:
    """Copies of `nbytes` through two lanes, as training makes them. Ends its lanes with the device."""
    host = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
    locked = all([device.page_lock(tensor) for tensor in host])
    there = [device.empty(nbytes, torch.uint8) for _ in range(2)]
    up, down = device.lane("upload", host=False), device.lane("download", host=False)

    def seconds(*lanes: bool) -> float:
        device.synchronize()
        start = time.perf_counter()
        marks = []
        if lanes[0]:
            marks.append(up.run(lambda: _copy(there[0], host[0])))
        if lanes[1]:
            marks.append(down.run(lambda: _copy(host[1], there[1])))
        for mark in marks:
            mark.wait()
        return time.perf_counter() - start

    def best(*lanes: bool) -> float:
        return nbytes / min(seconds(*lanes) for _ in range(TRIES))

    return Link(best(True, False), best(False, True), best(True, True), locked and device.kind != "cpu")


def page_lock_rate(device: Device, nbytes: int = PAGE_LOCK_NBYTES) -> float | None:
    """Bytes a second that can be page-locked, or None where `nbytes` at once are refused."""
    memory = torch.ones(nbytes, dtype=torch.uint8)  # touched, as it is when it holds weights
    start = time.perf_counter()
    return nbytes / (time.perf_counter() - start) if device.page_lock(memory) else None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
