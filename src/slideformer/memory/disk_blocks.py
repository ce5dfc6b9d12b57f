"""One block of an extent, between memory and a file: the only place that reads and writes.

A block that starts on a page in memory moves from and to there; its last, partial page passes through a page of the
thread's. An unaligned one passes through the thread's block.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

from slideformer.memory.disk_extent import PAGE, checksum, padded


class Block(NamedTuple):
    """file: open. offset: where the data goes in it. page: of the extent, the first one of the data. data: its bytes
    in memory. aligned: they start on a page there."""

    file: int
    offset: int
    page: int
    data: memoryview
    aligned: bool


class Short(Exception):
    """A file gave or took fewer bytes than asked, and then no more."""


class Own:
    """A thread's memory: a page for a header, and a block, of which the pages are touched that are needed."""

    def __init__(self, block_nbytes: int) -> None:
        whole = memoryview(mmap.mmap(-1, PAGE + block_nbytes))
        self.head, self._staging = whole[:PAGE], whole[PAGE:]

    def write(self, block: Block, head: bytes | None) -> int:
        """The checksum of what was written. head: the page before the data, where this block is an extent's first."""
        straight, staged = self._split(block)
        rest = block.data[len(straight) :]
        staged[: len(rest)] = rest
        staged[len(rest) :] = bytes(len(staged) - len(rest))
        total = _sum(block, straight, staged)
        if head is not None:
            self.head[:] = head
        _move(os.pwritev, block, head is not None, [self.head, straight, staged])
        return total

    def read(self, block: Block, *, head: bool) -> int:
        """The checksum of what was read. head: the page before the data is read as well, into `self.head`."""
        straight, staged = self._split(block)
        _move(os.preadv, block, head, [self.head, straight, staged])
        rest = block.data[len(straight) :]
        rest[:] = staged[: len(rest)]
        return _sum(block, straight, staged)

    def _split(self, block: Block) -> tuple[memoryview, memoryview]:
        """The block's whole pages that move straight from or to memory, and the pages that its rest passes through."""
        nbytes = len(block.data)
        whole = nbytes // PAGE * PAGE if block.aligned else 0
        return block.data[:whole], self._staging[: padded(nbytes - whole)]


def _sum(block: Block, straight: memoryview, staged: memoryview) -> int:
    return checksum(straight, block.page) + checksum(staged, block.page + len(straight) // PAGE)


def _move(call: Callable[[int, list[memoryview], int], int], block: Block, head: bool, parts: list[memoryview]) -> None:
    """All of the parts, header first, however often the system stops on the way. Raises OSError, Short."""
    left = [part for part in parts[not head :] if len(part)]
    offset = block.offset - PAGE * head
    tries = 0
    while left:
        moved = call(block.file, left, offset) // PAGE * PAGE  # what follows a partial page would not be aligned
        tries = 0 if moved else tries + 1
        if tries == 2:  # an end of file; or a disk that was full and, asked once more, says why
            raise Short(f"{sum(map(len, left))} bytes at {offset} are missing")
        offset += moved
        left = _behind(left, moved)


def _behind(parts: list[memoryview], moved: int) -> list[memoryview]:
    rest = []
    for part in parts:
        rest += [part[moved:]] if moved < len(part) else []
        moved = max(moved - len(part), 0)
    return rest
