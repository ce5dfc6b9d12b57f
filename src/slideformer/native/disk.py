"""Blocks between memory and files, on threads of the native library, which never wait for the interpreter.

csrc/slideformer_native.h says what each function does; this file turns what comes back into errors.
"""

from __future__ import annotations

import os
import weakref
from ctypes import CDLL, Structure, byref, c_char, c_int64, c_uint64

from torch import Tensor

_SHORT, _STOPPED = -1, -2  # enum sf_disk_status


class ShortFile(Exception):
    """A file gave or took fewer bytes than asked, and then no more."""


class Stopped(Exception):
    """The threads were stopped before all was done."""


class _Moved(Structure):
    _fields_ = [("sum", c_uint64), ("missing", c_int64), ("offset", c_int64)]


class NativeDisk:
    """Threads that share the blocks of all calls, one of each call in turn. Stop it."""

    def __init__(self, library: CDLL, *, threads: int, block_nbytes: int, sums: bool) -> None:
        """block_nbytes: whole pages. sums: without them every checksum is 0. Raises OSError where the threads cannot be
        started."""
        self._library = library
        self._disk: int | None = library.sf_disk_create(threads, block_nbytes, sums)
        if self._disk is None:
            raise OSError(f"could not start {threads} threads for the disk")
        end = weakref.finalize(self, library.sf_disk_destroy, self._disk)  # not in `stop`: a call may be on its way out
        end.atexit = False  # one that hangs on a disk may be at work still

    def write(self, file: int, offset: int, head: bytearray, data: Tensor) -> int:
        """Write head [4096] at `offset` of an open file, and the data behind it, filled up with zeros to whole pages.

        data: uint8 [n], host. offset: whole pages. Gives back the data's checksum. Blocks, without the GIL.
        Raises OSError, ShortFile, Stopped.
        """
        return self._move(1, file, offset, head, data)

    def read(self, file: int, offset: int, head: bytearray, data: Tensor) -> int:
        """The other way; overwrites head and data, and no byte behind them."""
        return self._move(0, file, offset, head, data)

    def stop(self) -> None:
        """Blocks under way are finished, all others dropped. Once."""
        self._library.sf_disk_stop(self._disk)

    def _move(self, write: int, file: int, offset: int, head: bytearray, data: Tensor) -> int:
        moved = _Moved()
        page = (c_char * len(head)).from_buffer(head)
        status = self._library.sf_disk_move(
            self._disk, write, file, offset, page, data.data_ptr(), data.numel(), byref(moved)
        )
        if status == _SHORT:
            raise ShortFile(f"{moved.missing} bytes at {moved.offset} are missing")
        if status == _STOPPED:
            raise Stopped
        if status:
            raise OSError(status, os.strerror(status))
        return moved.sum
