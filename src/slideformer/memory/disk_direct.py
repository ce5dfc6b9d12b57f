"""Files whose reads and writes pass the system's page cache, and a look at whether they really do."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from slideformer.memory.disk_extent import PAGE

PROBE_NBYTES = 64 * PAGE
PROBE_NAME = "direct.probe"


def open_file(path: Path, *, direct: bool) -> int:
    """A new file, open for reading and writing. Raises OSError, EINVAL where `direct` is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)


def passes_the_cache(folder: Path) -> bool:
    """Write and read a small file with O_DIRECT, and ask the kernel which of its pages are in memory after that.

    Some file systems refuse the flag, others take it and use the cache all the same. Raises OSError where the folder
    cannot be written to.
    """
    path = folder / PROBE_NAME
    try:
        file = open_file(path, direct=True)
    except OSError as error:
        if path.exists():  # some make the file before they refuse the flag
            path.unlink()
        if isinstance(error, FileExistsError | PermissionError):
            raise
        return False
    try:
        return _passes(file)
    finally:
        os.close(file)
        path.unlink()


def would_pass_the_cache(folder: Path) -> bool | None:
    """The same in a folder that nothing is to be left in, whatever happens: with a file without a name. None where the
    file system has no such files. Raises OSError as above."""
    try:
        file = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return None
    try:
        return _passes(file)
    finally:
        os.close(file)


def _passes(file: int) -> bool:
    try:
        with mmap.mmap(-1, PROBE_NBYTES) as memory:
            os.pwritev(file, [memory], 0)
            os.preadv(file, [memory], 0)
        return resident_nbytes_of(file) == 0
    except OSError:
        return False


def resident_nbytes_of(file: int) -> int:
    """How much of an open file is in the page cache (mincore)."""
    nbytes = os.fstat(file).st_size
    pages = -(-nbytes // mmap.PAGESIZE)
    with mmap.mmap(file, nbytes) as mapped:
        address = ctypes.addressof(start := ctypes.c_char.from_buffer(mapped))
        there = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), there):
            raise OSError(ctypes.get_errno(), "mincore")
        del start  # else the mapping cannot be closed
    return sum(page & 1 for page in there) * mmap.PAGESIZE
