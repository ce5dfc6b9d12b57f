"""What stands before the data of an extent on disk, and the checksum of that data.

A folder of files serves one run: the run remembers what it wrote, the header says on disk whose bytes these are. So a
file that was cut, overwritten, put back from a copy, or that lost a write is told from the one that was written.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from functools import cache

import numpy as np

PAGE = 4096
"""Bytes: what direct I/O moves, and where every extent, header and block starts."""

_FIELDS = struct.Struct("<8s16s16sQQQ")
_SUM = struct.Struct("<I")
_MAGIC = b"SFEXTENT"
GOLDEN, MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of splitmix64 (Steele, Lea & Flood, OOPSLA 2014)."""

_PIECE = 64 * PAGE  # summed at a time, so that temporaries stay in the cache


def padded(nbytes: int) -> int:
    """Bytes that `nbytes` take in whole pages."""
    return -(-nbytes // PAGE) * PAGE


def name_digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def header(run: bytes, digest: bytes, extent: int, generation: int, nbytes: int) -> bytes:
    """The page before the data. run, digest: 16 bytes each; generation: writes of this extent, this one counted."""
    fields = _FIELDS.pack(_MAGIC, run, digest, extent, generation, nbytes)
    return (fields + _SUM.pack(zlib.crc32(fields))).ljust(PAGE, b"\0")


def difference(found: bytes, expected: bytes) -> str | None:
    """What is wrong with a header that was read; None where it is the expected one. Both [PAGE]."""
    if found == expected:
        return None
    fields, wanted = (_FIELDS.unpack_from(page) for page in (found, expected))
    if not any(found):
        return "there are zeros where its header was"
    if fields[0] != _MAGIC or _SUM.unpack_from(found, _FIELDS.size)[0] != zlib.crc32(found[: _FIELDS.size]):
        return "its header was overwritten"
    if fields[1] != wanted[1]:
        return "it was written by another run"
    if fields[2:4] != wanted[2:4]:
        return "another extent's data is in its place"
    if fields[4] != wanted[4]:
        return f"it holds write {fields[4]} where write {wanted[4]} was the last: a write was lost, or undone"
    return "its header was changed"


def checksum(pages: memoryview, first_page: int) -> int:
    """A sum over whole pages that start at page `first_page` of an extent. Sums of parts of an extent add up
    (mod 2^64) to that of the whole, in any order. The native library has the same, five to thirty times faster.

    Each 64-bit word adds itself and the product of its halves, each with a key of its place in the page added (as NH of
    Black et al., UMAC, 1999); a page's sum is mixed with its place in the extent. So bits that change anywhere, words
    or pages that change places, and pages that go missing all show, but for one in 2^32 at worst.
    """
    key = keys()
    total = 0
    for start in range(0, len(pages), _PIECE):
        words = np.frombuffer(pages[start : start + _PIECE], dtype="<u4").reshape(-1, PAGE // 4)
        keyed = words + key
        sums = keyed[:, 0::2].astype(np.uint64) * keyed[:, 1::2]
        sums += words.view("<u8")
        first = first_page + start // PAGE + 1
        places = np.arange(first, first + len(words), dtype=np.uint64) * np.uint64(GOLDEN)
        total += int(_mixed(sums.sum(axis=1, dtype=np.uint64) + places).sum(dtype=np.uint64))
    return total % 2**64


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX[1])
    return x ^ (x >> np.uint64(31))


@cache
def keys() -> np.ndarray:
    """uint32 [PAGE / 4]: two for each word of a page: the numbers that splitmix64 gives from 0 on."""
    return _mixed(np.arange(1, PAGE // 8 + 1, dtype=np.uint64) * np.uint64(GOLDEN)).view("<u4")
