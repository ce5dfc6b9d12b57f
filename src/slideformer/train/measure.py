"""Measures the link between host and device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from slideformer.device import Device
from slideformer.engine.rates import TRIES

COPY_NBYTES = 2**28
PAGE_LOCK_NBYTES = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second to the device, from it, and each way when both run at once."""

    upload: float
    download: float
    both: float


def link_speed(device: Device, nbytes: int = COPY_NBYTES) -> Link:
    """Copies of `nbytes` through two lanes, as training makes them. Ends its lanes with the device."""
    host = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
    for tensor in host:
        device.page_lock(tensor)
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

    return Link(best(True, False), best(False, True), best(True, True))


def page_lock_rate(device: Device, nbytes: int = PAGE_LOCK_NBYTES) -> float | None:
    """Bytes a second that can be page-locked, or None where `nbytes` at once are refused."""
    memory = torch.ones(nbytes, dtype=torch.uint8)  # touched, as it is when it holds weights
    start = time.perf_counter()
    return nbytes / (time.perf_counter() - start) if device.page_lock(memory) else None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
