"""Engines that are ready soon: host memory that they take one after another, and weights that are drawn once.

Touching memory takes longer than all else. While a `HostPool` is open, arenas are parts of one mapping. Each engine
must be gone before `reset`.
"""

from __future__ import annotations

import mmap
import re

import torch

import slideformer.memory.host as host
from shapes import random_weight
from slideformer.engine import Engine

PAGE = 4096

STATE_NBYTES = 12.5
"""Bytes of host memory a parameter: the state, and some for what lies beside it."""


class HostPool:
    """Stands where memory/host.py has its mmap module; what exceeds the pool is mapped as ever."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")
        self._used = 0

    def reset(self, nbytes: int) -> None:
        """Nothing is taken, and there is room for so many bytes."""
        self._used = 0
        if nbytes > self._bytes.numel():
            self._bytes, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")  # the old one goes first
            memory = mmap.mmap(-1, nbytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._view = memoryview(memory)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def mmap(self, fileno: int, nbytes: int) -> object:
        """The next bytes, zero; touched by many threads at once."""
        start, end = self._used, self._used + -(-nbytes // PAGE) * PAGE
        if end > self._bytes.numel():
            return mmap.mmap(fileno, nbytes)
        self._used = end
        self._bytes[start:end].zero_()
        return self._view[start : start + nbytes]

    def __enter__(self) -> HostPool:
        self._before, host.mmap = host.mmap, self
        return self

    def __exit__(self, *exc: object) -> None:
        host.mmap = self._before


def fill_alike(engine: Engine) -> None:
    """Random weights, drawn once for all blocks."""
    drawn: dict[str, torch.Tensor] = {}
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            name = re.sub(r"\.\d+\.", ".0.", param.name)
            if name not in drawn:
                drawn[name] = random_weight(name, param.shape, engine.device.torch_device).cpu().flatten()
            engine.write(index, unit.offsets[param.name], drawn[name])
