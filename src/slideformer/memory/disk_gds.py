"""Extents between files and the device's own memory (GPUDirect Storage), through kvikio: an optional extra.

Where the system cannot do that, kvikio moves them through host memory: `real` says which it is. torch's own binding of
cuFile blocks and knows no threads.
"""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import torch

from slideformer.errors import BadInput
from slideformer.memory.disk_extent import GOLDEN, MIX, PAGE, keys
from slideformer.native import ShortFile

PIECE_NBYTES = 4 << 20
"""Summed at a time."""

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

    def write(self, offset: int, data: torch.Tensor) -> None:
        """data: uint8 [n], device; what is to be written must be there. Blocks. Raises OSError, ShortFile."""
        self._whole("pwrite", offset, data)

    def read(self, offset: int, data: torch.Tensor) -> None:
        """The other way; nothing else may be at work on `data`. What is launched after this finds it."""
        self._whole("pread", offset, data)

    def close(self) -> None:
        self._file.close()

    def _whole(self, call: str, offset: int, data: torch.Tensor) -> None:
        if data.numel() == 0:
            return
        try:
            moved = getattr(self._file, call)(data, file_offset=offset).get()
        except RuntimeError as error:  # of kvikio, with a place in its sources
            raise OSError(errno.EIO, str(error)) from None
        if moved != data.numel():
            raise ShortFile(f"{data.numel() - moved} bytes at {offset + moved} are missing")


def device_checksum(data: torch.Tensor) -> int:
    """`disk_extent.checksum` of the data, filled up with zeros to whole pages. data: uint8 [n], any device. Blocks."""
    key = torch.from_numpy(keys().view(np.int64)).to(data.device)
    low_key, high_key = key & _LOW, (key >> 32) & _LOW
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), PIECE_NBYTES):
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
