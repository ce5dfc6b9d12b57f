"""Host arenas: one allocation of exactly the size asked for, page-locked in place where the device wants that.

Not `pin_memory()`: torch rounds it up to a power of two (2.08 GiB took 4.0) and is ten times slower than registering
touched memory (2.4 s against 0.25 s for 4 GiB; H200 machine, 2026-11-30).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable

import torch

from slideformer.device import Device
from slideformer.errors import DoesNotFit

ALIGN = 64
"""Bytes: one cache line, and the widest vector register."""

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; Python's mmap has no name for it, and its `madvise` keeps the interpreter's lock."""

POPULATE_NBYTES = 64 << 20

DEVICE_ALIGN = 512
"""Bytes: what torch's CUDA allocator aligns to."""


def aligned(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


def arena_nbytes(sizes: Iterable[tuple[int, torch.dtype]]) -> int:
    """Bytes of an arena that holds exactly these (numel, dtype) tensors, each starting on a cache line."""
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in sizes)


class Arena:
    """Anonymous memory of a fixed size, handed out front to back, zero at first and not touched before it is used."""

    def __init__(self, nbytes: int, name: str) -> None:
        """Raises DoesNotFit when the kernel refuses the mapping."""
        self.name, self.nbytes = name, nbytes
        self._used = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            try:
                memory = mmap.mmap(-1, nbytes)
            except OSError as error:
                raise DoesNotFit(
                    f"the host refused {nbytes / 2**30:.2f} GiB for {name} ({error.strerror}): "
                    "free memory, or train a smaller model or batch"
                ) from error
            if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 4 << 20:
                try:
                    memory.madvise(mmap.MADV_HUGEPAGE)
                except OSError:
                    pass  # a kernel without huge pages: slower to touch, nothing else
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def of(cls, sizes: Iterable[tuple[int, torch.dtype]], name: str) -> Arena:
        return cls(arena_nbytes(sizes), name)

    def take(self, numel: int, dtype: torch.dtype, *, align: int = ALIGN) -> torch.Tensor:
        """The next [numel] of the arena, starting on a cache line, or on a multiple of `align` bytes if all of the
        arena's pieces are asked for so."""
        nbytes = numel * dtype.itemsize
        if self._used + nbytes > self.nbytes:
            raise AssertionError(f"arena {self.name} holds {self.nbytes} bytes, {self._used} are used, {nbytes} asked")
        piece = self._bytes[self._used : self._used + nbytes].view(dtype)
        self._used += aligned(nbytes, align)
        return piece

    def populate(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Have the kernel give the pages now rather than when they are touched; changes nothing that is there, and may
        run beside whoever writes. Blocks, without the interpreter's lock, until all are there, it is not `wanted` any
        more, or the kernel does not know how."""
        advise = getattr(ctypes.CDLL(None), "madvise", None)
        for start in range(0, self.nbytes if advise else 0, POPULATE_NBYTES):
            address = ctypes.c_void_p(self._bytes.data_ptr() + start)
            nbytes = ctypes.c_size_t(min(POPULATE_NBYTES, self.nbytes - start))
            if not wanted() or advise(address, nbytes, MADV_POPULATE_WRITE):
                return

    def page_lock(self, device: Device) -> bool:
        return device.page_lock(self._bytes)

    def page_unlock(self, device: Device) -> None:
        """When no lane copies from it or to it any more."""
        device.page_unlock(self._bytes)
