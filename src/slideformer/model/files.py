"""Files that are written whole: summed while they are written, and on disk when the call returns."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

EARLY_NBYTES = 2**20
"""From this size on the disk is set to work at once, beside the sum and the next piece, rather than at the flush. Six
saves of 0.77 GB, 2-core Sapphire Rapids, 2026-11-30: 0.8 to 1.5 times (median 0.9) the time of plain writes and flushes
of the same files; without it, three saves, 1.1 to 1.9."""
READ_NBYTES = 2**20


@dataclass(frozen=True, slots=True)
class Sum:
    """CRC-32 rather than SHA-256, which takes 2.3 times as long (64 MiB, 2-core Sapphire Rapids, 2026-11-30): it guards
    against disks and copies, not against people."""

    nbytes: int
    crc32: int


class Summing:
    """Adds up what goes into a file. Without a buffer, so that closing a file on a disk that hangs writes nothing."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.nbytes, self.crc32 = file, 0, 0

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:  # a signal, or a disk that is all but full, makes a write a short one
            left = left[self._file.write(left) :]
        if len(data) >= EARLY_NBYTES:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.nbytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def write_file(path: Path, fill: Callable[[Summing], object]) -> Sum:
    """Write a new file with what `fill` writes. Blocks until it is on disk; raises OSError."""
    found = write_unflushed(path, fill)
    flush(path)
    return found


def write_unflushed(path: Path, fill: Callable[[Summing], object]) -> Sum:
    """The same, but a part may still be in the page cache: `flush` comes later. Raises OSError."""
    with open(path, "wb", buffering=0) as file:
        out = Summing(file)
        fill(out)
    return Sum(out.nbytes, out.crc32)


def flush(path: Path) -> None:
    """Block until a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> Sum:
    return write_file(path, lambda out: out.write(text.encode()))


def replace_text(path: Path, text: str) -> None:
    """Write a file anew in one go: nobody ever sees a half. Raises OSError."""
    partial = path.with_name(f".{path.name}")
    write_unflushed(partial, lambda out: out.write(text.encode()))
    partial.replace(path)


def sum_of(path: Path) -> Sum:
    """Of a file as the disk has it: what the page cache still holds of it is dropped first. Raises OSError."""
    nbytes = crc32 = 0
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(READ_NBYTES):
            nbytes, crc32 = nbytes + len(piece), zlib.crc32(piece, crc32)
    return Sum(nbytes, crc32)
