"""Host memory that engines of one process take one after another: touched once, which takes longer than all else.

While a `HostPool` is open, arenas are parts of one mapping. Each engine must be gone before `reset`.
"""

from __future__ import annotations

import mmap

import torch

import slideformer.memory.host as host

PAGE = 4096


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
