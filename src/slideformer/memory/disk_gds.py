"""Extents between files and the device's own memory (GPUDirect Storage), through kvikio: an optional extra.

Where the system cannot do that, kvikio moves them through host memory: `real` says which it is. torch's own binding of
cuFile blocks and knows no threads.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from slideformer.errors import BadInput
from slideformer.memory.disk_extent import GOLDEN, MIX, PAGE, keys
from slideformer.native import ShortFile

PIECE_NBYTES = 4 << 20
"""Moved and summed at a time: one is summed while others move."""

SUM_NBYTES = 5 * PIECE_NBYTES
"""On the device for the time of one sum: its temporaries."""


def require_kvikio() -> None:
    """Raise BadInput where kvikio is not installed, or does not find the libraries that it needs."""
    try:
        import kvikio  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise BadInput(
            f"GPUDirect Storage needs kvikio ({error}): pip install 'slideformer[gds]', or leave it off"
        ) from None


class Gds:
    """kvikio's threads and settings, which a process has once. real: the disk and the device talk directly."""

    def __init__(self, *, threads: int, block_nbytes: int) -> None:
        """Emulated, blocks pass through as much page-locked memory as all threads have in hand, and past the page cache
        as far as they are whole pages. Raises BadInput as `require_kvikio`."""
        require_kvikio()
        import kvikio
        from kvikio import cufile_driver, defaults

        self._open = kvikio.CuFile
        past_the_cache = {"auto_direct_io_read": True, "auto_direct_io_write": True}
        sizes = {"num_threads": threads, "task_size": block_nbytes, "bounce_buffer_size": block_nbytes}
        defaults.set({**sizes, **past_the_cache})
        self.real = not defaults.is_compat_mode_preferred() and bool(cufile_driver.get("is_gds_available"))

    def file(self, path: Path) -> GdsFile:
        """Raises BadInput where kvikio cannot open it."""
        try:
            return GdsFile(self._open(path, "r+"))
        except RuntimeError as error:
            raise BadInput(f"{path} cannot be opened by kvikio ({error}): leave GPUDirect Storage off") from None


class GdsFile:
    """A second way into a file that is there."""

    def __init__(self, opened: object) -> None:
        self._file = opened

    def write(self, offset: int, data: torch.Tensor) -> Moving:
        """Begin to write. data: uint8 [n], device; what is to be written must be there, and stay. Raises OSError, and
        nothing moves any more then."""
        return self._begun("pwrite", offset, data)

    def read(self, offset: int, data: torch.Tensor) -> Moving:
        """The other way; nothing else may be at work on `data`. What is launched when a piece is there finds it."""
        return self._begun("pread", offset, data)

    def close(self) -> None:
        self._file.close()

    def _begun(self, call: str, offset: int, data: torch.Tensor) -> Moving:
        move = getattr(self._file, call)
        pieces: list[tuple[object, int]] = []
        try:
            for start in range(0, data.numel(), PIECE_NBYTES):
                piece = data[start : start + PIECE_NBYTES]
                pieces.append((move(piece, file_offset=offset + start), piece.numel()))
        except BaseException as error:
            with suppress(OSError, ShortFile), Moving(pieces):
                pass  # those that have begun are at work in memory that the caller may then use otherwise
            if isinstance(error, RuntimeError):
                raise _of_kvikio(error) from None
            raise
        return Moving(pieces)


def _of_kvikio(error: RuntimeError) -> OSError:
    """Its text, which has a place in kvikio's sources."""
    return OSError(errno.EIO, str(error))


class Moving:
    """Pieces of PIECE_NBYTES on their way. As a context manager it waits for all of them, whatever happens inside."""

    def __init__(self, pieces: list[tuple[object, int]]) -> None:
        self._pieces, self._num_there = pieces, 0

    def wait(self, index: int) -> None:
        """Until the pieces up to this one are there. Raises OSError, ShortFile."""
        while self._num_there <= index:
            future, nbytes = self._pieces[self._num_there]
            self._num_there += 1
            try:
                moved = future.get()
            except RuntimeError as error:
                raise _of_kvikio(error) from None
            if moved != nbytes:
                raise ShortFile(f"{nbytes - moved} bytes of piece {self._num_there - 1} are missing")

    def __enter__(self) -> Moving:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        failed: Exception | None = None
        while self._num_there < len(self._pieces):
            try:
                self.wait(len(self._pieces) - 1)
            except (OSError, ShortFile) as error:
                failed = failed or error
        if failed is not None and kind is None:
            raise failed


def device_checksum(data: torch.Tensor, before: Callable[[int], None] = lambda index: None) -> int:
    """`disk_extent.checksum` of the data, filled up with zeros to whole pages. data: uint8 [n], any device. before:
    called with the number of each piece of PIECE_NBYTES before it is looked at. Blocks."""
    key = torch.from_numpy(keys().view(np.int64)).to(data.device)
    low_key, high_key = key & _LOW, (key >> 32) & _LOW
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for index, start in enumerate(range(0, data.numel(), PIECE_NBYTES)):
        before(index)
        piece = data[start : start + PIECE_NBYTES]
        if piece.numel() % PAGE or piece.storage_offset() % 8:
            whole = torch.zeros(-(-piece.numel() // PAGE) * PAGE, dtype=torch.uint8, device=data.device)
            whole[: piece.numel()] = piece
            piece = whole
        words = piece.view(torch.int64).view(-1, PAGE // 8)
        product = (words + low_key) & _LOW
        product *= ((words >> 32) + high_key) & _LOW
        first = start // PAGE + 1
        places = torch.arange(first, first + len(words), device=data.device) * _signed(GOLDEN)
        total += _mixed((product + words).sum(1) + places).sum()
    return int(total) % 2**64


_LOW = 0xFFFFFFFF


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(MIX[1])
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """As of unsigned words: torch shifts the sign in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
