"""Measures what a plan depends on: how fast the disk under a folder takes and gives extents."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slideformer.memory.disk import DiskFolder

EXTENT_NBYTES = 32 << 20  # a tile of 16 Mi bf16 weights
NUM_EXTENTS = 8


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second. read, write: nothing else at work. both_read, both_write: each while the other is at work."""

    read: float
    write: float
    both_read: float
    both_write: float


def disk_rates(
    folder: DiskFolder, *, seconds: float = 1.0, memory: Callable[[], torch.Tensor] | None = None
) -> DiskRates:
    """Write, read, and do both at once, in a file of 256 MiB that is removed again: for about `seconds`, or as long as
    it takes to move 320 MiB. memory: makes uint8 [EXTENT_NBYTES], on a GPU where the folder has gds; None: the host's.
    Blocks. Raises DoesNotFit, DiskFault."""
    each, made = seconds / 4, memory or _memory
    source, target = made().random_(0, 255), made()
    file = folder.file("rates", [EXTENT_NBYTES] * NUM_EXTENTS)
    try:
        num = _moved(file.write, source, range(NUM_EXTENTS), each, once=True).count  # slower than any later time
        write = _moved(file.write, source, range(num), each)
        read = _moved(file.read, target, range(num), each)
        with ThreadPoolExecutor(1) as beside:
            reader = beside.submit(_moved, file.read, target, range(num // 2), each)
            both_write = _moved(file.write, source, range(num // 2, num), each)
            both_read = reader.result()
    finally:
        folder.remove(file)
    return DiskRates(read.rate, write.rate, both_read.rate, both_write.rate)


def _memory() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, EXTENT_NBYTES), dtype=torch.uint8)


class _Moved(NamedTuple):
    count: int
    rate: float


def _moved(
    call: Callable[[int, torch.Tensor], None],
    memory: torch.Tensor,
    extents: Sequence[int],
    seconds: float,
    *,
    once: bool = False,
) -> _Moved:
    """Extents in turn until time is over, two at least. once: none of them again."""
    began, count = time.perf_counter(), 0
    while count < 2 or (time.perf_counter() - began < seconds and not (once and count == len(extents))):
        call(extents[count % len(extents)], memory)
        count += 1
    return _Moved(count, count * EXTENT_NBYTES / (time.perf_counter() - began))
