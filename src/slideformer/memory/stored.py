"""What of the state and of the saved inputs lies in files: one file a content, one extent a tile.

Lanes move whole tiles (`StoredTile`). Whoever reads or sets parts of a plane between steps does so through `Stored`,
which keeps the tile in hand open, so that a plane written piece by piece is not read and written once a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slideformer.layout import Layout, Tile
from slideformer.memory.disk import DiskFile, DiskFolder
from slideformer.memory.disk_extent import PAGE, padded

DTYPES = {
    "weight": torch.bfloat16,
    "residual": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}


class StoredTile:
    """One extent of a file. Until it is written it holds zeros, which take no reading. num_writes: so far."""

    __slots__ = ("_extent", "_file", "dtype", "num_writes", "numel")

    def __init__(self, file: DiskFile, extent: int, numel: int, dtype: torch.dtype) -> None:
        self._file, self._extent, self.numel, self.dtype, self.num_writes = file, extent, numel, dtype, 0

    def read(self, into: torch.Tensor) -> None:
        """Fill the first `numel` elements. into: 1-D, `dtype`, host, or on a GPU where the folder has gds. Blocks;
        raises DiskFault."""
        if self.num_writes == 0:
            into[: self.numel].zero_()
            into[:1].cpu()  # on a GPU it was only launched
        else:
            self._file.read(self._extent, into[: self.numel])

    def write(self, source: torch.Tensor) -> None:
        """From the first `numel` elements. Blocks; raises DiskFault."""
        self.num_writes += 1  # also if it fails: then it cannot be read, rather than be taken for blank
        self._file.write(self._extent, source[: self.numel])


def extent_nbytes(nbytes: int) -> int:
    """What an extent for so many bytes of data takes in its file."""
    return PAGE + padded(nbytes)


def plane_tiles(layout: Layout, unit: int, content: str, *, keep_residual: bool) -> tuple[Tile, ...]:
    """The tiles of one content of a unit: planes may end where the trained part does."""
    return layout.tiles(unit, trained=content != "weight" and not (content == "residual" and keep_residual))


def stored_nbytes(layout: Layout, disk: Iterable[tuple[str, int]], *, keep_residual: bool) -> dict[str, int]:
    """Bytes of the files, by content, headers and padding counted in. disk: (content, unit) pairs."""
    found: dict[str, int] = {}
    for content, unit in disk:
        tiles = plane_tiles(layout, unit, content, keep_residual=keep_residual)
        nbytes = sum(extent_nbytes(t.numel * DTYPES[content].itemsize) for t in tiles)
        found[content] = found.get(content, 0) + nbytes
    return found


@dataclass(slots=True)
class _Open:
    key: tuple[str, int, int]
    values: torch.Tensor
    num_writes: int  # of the tile when it was read: with more, the values are old
    changed: bool = False


class Stored:
    """Planes of units in files. `put` is for between steps; `part` and `flush` may come while one runs."""

    def __init__(
        self, folder: DiskFolder, layout: Layout, disk: Sequence[tuple[str, int]], *, keep_residual: bool
    ) -> None:
        """disk: (content, unit) pairs. Makes the files at their full size. Raises DoesNotFit, BadInput."""
        self._folder, self._layout, self._keep_residual = folder, layout, keep_residual
        self.pairs = frozenset(disk)
        self._tiles: dict[tuple[str, int, int], StoredTile] = {}
        self._open: dict[str, _Open] = {}
        for content, dtype in DTYPES.items():
            keys = [(unit, t) for c, unit in disk if c == content for t in self._cuts(content, unit)]
            if keys:
                file = folder.file(content, [t.numel * dtype.itemsize for _, t in keys])
                for extent, (unit, t) in enumerate(keys):
                    self._tiles[content, unit, t.index] = StoredTile(file, extent, t.numel, dtype)

    def tile(self, content: str, unit: int, tile: int) -> StoredTile:
        return self._tiles[content, unit, tile]

    def numel(self, content: str, unit: int) -> int:
        return sum(t.numel for t in self._cuts(content, unit))

    def part(self, content: str, unit: int, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a plane, as far as it goes: a new host tensor. Blocks; raises DiskFault. While a
        step runs: only of units that it does not change meanwhile."""
        stop = min(stop, self.numel(content, unit))
        out = torch.empty(max(stop - start, 0), dtype=DTYPES[content])
        with self._folder.guard:
            for t, begin, end in self._overlaps(content, unit, start, stop):
                found = self._opened(content, unit, t)
                out[begin - start : end - start] = found.values[begin - t.start : end - t.start]
                if end == t.stop:  # whoever reads piece by piece is done with it
                    self._shut(content)
        return out

    def put(self, content: str, unit: int, offset: int, values: torch.Tensor) -> None:
        """Set elements of a plane from `offset` on, those beyond its end left out. On disk after `flush`."""
        stop = min(offset + values.numel(), self.numel(content, unit))
        with self._folder.guard:
            for t, begin, end in self._overlaps(content, unit, offset, stop):
                found = self._opened(content, unit, t)
                found.values[begin - t.start : end - t.start] = values[begin - offset : end - offset]
                found.changed = True

    def flush(self) -> None:
        """Everything that was put is in the files. Raises DiskFault."""
        if not any(found.changed for found in list(self._open.values())):
            return  # without the guard, which a checkpoint's reads may hold for long
        with self._folder.guard:
            for content in [c for c, found in self._open.items() if found.changed]:
                self._shut(content)

    def _cuts(self, content: str, unit: int) -> tuple[Tile, ...]:
        return plane_tiles(self._layout, unit, content, keep_residual=self._keep_residual)

    def _overlaps(self, content: str, unit: int, start: int, stop: int) -> list[tuple[Tile, int, int]]:
        cuts = ((t, max(t.start, start), min(t.stop, stop)) for t in self._cuts(content, unit))
        return [(t, begin, end) for t, begin, end in cuts if begin < end]

    def _opened(self, content: str, unit: int, tile: Tile) -> _Open:
        key = (content, unit, tile.index)
        stored, found = self._tiles[key], self._open.get(content)
        if found is None or (found.key, found.num_writes) != (key, stored.num_writes):
            if found is not None:
                self._shut(content)
            values = torch.empty(tile.numel, dtype=DTYPES[content])
            stored.read(values)
            found = self._open[content] = _Open(key, values, stored.num_writes)
        return found

    def _shut(self, content: str) -> None:
        found = self._open[content]
        if found.changed:
            self._tiles[found.key].write(found.values)
        del self._open[content]
