"""Blocks between memory and files on threads of Python's, for machines where the native library could not be built.

Bit for bit what `NativeDisk` does, but calls are served one after the other, and blocks are summed in numpy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from errno import EAGAIN
from queue import SimpleQueue

from torch import Tensor

from slideformer.memory.disk_extent import PAGE, checksum, padded
from slideformer.native import ShortFile, Stopped

Call = Callable[[int, list[memoryview], int], int]


class StandInDisk:
    """The door of `NativeDisk`: see there."""

    def __init__(self, *, threads: int, block_nbytes: int, sums: bool) -> None:
        self._block_nbytes, self._stopped = block_nbytes, False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._own: SimpleQueue[_Own] = SimpleQueue()
        for _ in range(threads):
            self._own.put(_Own(block_nbytes, sums=sums))

    def write(self, file: int, offset: int, head: bytearray, data: Tensor) -> int:
        return self._move(_Own.write, file, offset, head, data)

    def read(self, file: int, offset: int, head: bytearray, data: Tensor) -> int:
        return self._move(_Own.read, file, offset, head, data)

    def stop(self) -> None:
        self._stopped = True
        self._pool.shutdown()

    def _move(self, one: Callable[..., int], file: int, offset: int, head: bytearray, data: Tensor) -> int:
        whole, aligned = memoryview(data.numpy()), data.data_ptr() % PAGE == 0
        futures = []
        try:
            for start in range(0, max(len(whole), 1), self._block_nbytes):
                block = whole[start : start + self._block_nbytes]
                at, first = (offset + PAGE + start, None) if start else (offset, head)
                futures.append(self._pool.submit(self._lent, one, file, at, first, block, aligned, start // PAGE))
        except RuntimeError as error:
            if self._stopped:
                raise Stopped from None
            raise OSError(EAGAIN, str(error)) from None  # no thread could be started
        finally:
            wait(futures)  # memory is the caller's again when this returns, whatever happened
        return sum(future.result() for future in futures) % 2**64

    def _lent(self, one: Callable[..., int], *block: object) -> int:
        if self._stopped:
            raise Stopped
        own = self._own.get()
        try:
            return one(own, *block)
        finally:
            self._own.put(own)


class _Own:
    """A thread's memory: a page for a header, and a block, of which the pages are touched that are needed.

    A block that starts on a page in memory moves from and to there; its last, partial page, and an unaligned block,
    through here.
    """

    def __init__(self, block_nbytes: int, *, sums: bool) -> None:
        whole = memoryview(mmap.mmap(-1, PAGE + block_nbytes))
        self._head, self._staging, self._sums = whole[:PAGE], whole[PAGE:], sums

    def write(self, file: int, at: int, head: bytearray | None, block: memoryview, aligned: bool, page: int) -> int:
        straight, staged = self._split(block, aligned)
        rest = block[len(straight) :]
        staged[: len(rest)] = rest
        staged[len(rest) :] = bytes(len(staged) - len(rest))
        total = self._sum(straight, staged, page)
        if head is not None:
            self._head[:] = head
        _move(os.pwritev, file, at, [straight, staged] if head is None else [self._head, straight, staged])
        return total

    def read(self, file: int, at: int, head: bytearray | None, block: memoryview, aligned: bool, page: int) -> int:
        straight, staged = self._split(block, aligned)
        _move(os.preadv, file, at, [straight, staged] if head is None else [self._head, straight, staged])
        if head is not None:
            head[:] = self._head
        rest = block[len(straight) :]
        rest[:] = staged[: len(rest)]
        staged[len(rest) :] = bytes(len(staged) - len(rest))  # a device's write leaves there what it finds
        return self._sum(straight, staged, page)

    def _split(self, block: memoryview, aligned: bool) -> tuple[memoryview, memoryview]:
        """What moves straight from or to memory, and the pages that the rest passes through."""
        whole = len(block) // PAGE * PAGE if aligned else 0
        return block[:whole], self._staging[: padded(len(block) - whole)]

    def _sum(self, straight: memoryview, staged: memoryview, page: int) -> int:
        if not self._sums:
            return 0
        return checksum(straight, page) + checksum(staged, page + len(straight) // PAGE)


def _move(call: Call, file: int, offset: int, parts: list[memoryview]) -> None:
    """All of the parts, front to back, however often the system stops on the way."""
    left = [part for part in parts if len(part)]
    tries = 0
    while left:
        moved = call(file, left, offset) // PAGE * PAGE  # what follows a partial page would not be aligned
        tries = 0 if moved else tries + 1
        if tries == 2:  # an end of file; or a disk that was full and, asked once more, says why
            raise ShortFile(f"{sum(map(len, left))} bytes at {offset} are missing")
        offset += moved
        left = _behind(left, moved)


def _behind(parts: list[memoryview], moved: int) -> list[memoryview]:
    rest = []
    for part in parts:
        rest += [part[moved:]] if moved < len(part) else []
        moved = max(moved - len(part), 0)
    return rest
