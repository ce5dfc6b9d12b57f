"""The state on the host: both planes of every master weight, and the moments of every trained one.

12 bytes a trained parameter (2 + 2 + 4 + 4), and as much again for what is updated ahead. The weight plane is
page-locked and is itself what is uploaded. A frozen parameter has no moments, and under bf16 compute no residual
either: 2 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from slideformer.device import Device
from slideformer.layout import Layout
from slideformer.memory.host import Arena, arena_nbytes
from slideformer.native import HostKernels, Planes

PIECE_NUMEL = 1 << 22
"""Elements split or joined at a time when weights are read or written, so that temporaries stay small (16 MiB)."""


PlaneName = Literal["weight", "residual", "exp_avg", "exp_avg_sq"]  # the fields of Planes


class Moments(NamedTuple):
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Twin:
    """Two copies of one tile's state. One is current; an update ahead of its verdict writes the other."""

    __slots__ = ("_copies", "_index")

    def __init__(self, first: Planes, second: Planes) -> None:
        self._copies, self._index = (first, second), 0

    @property
    def index(self) -> int:
        return self._index

    @property
    def current(self) -> Planes:
        return self._copies[self._index]

    @property
    def other(self) -> Planes:
        return self._copies[1 - self._index]

    def swap(self) -> None:
        """The other copy becomes the current one."""
        self._index = 1 - self._index


def state_sizes(
    layout: Layout, *, keep_residual: bool, units: Iterable[int] | None = None
) -> dict[str, list[tuple[int, torch.dtype]]]:
    """Lengths and dtypes of every plane and moment, per unit (of `units`; None: of all). keep_residual: see `State`."""
    chosen = [layout.units[u] for u in (range(len(layout.units)) if units is None else units)]
    trained = [(u.train_numel, torch.float32) for u in chosen]
    return {
        "weights": [(u.numel, torch.bfloat16) for u in chosen],
        "residuals": [(u.numel if keep_residual else u.train_numel, torch.int16) for u in chosen],
        "first moments": trained,
        "second moments": trained,
    }


def state_nbytes(layout: Layout, *, keep_residual: bool, ahead: Iterable[int] = ()) -> dict[str, int]:
    """Bytes of the arenas of a `State`, by term."""
    sizes = state_sizes(layout, keep_residual=keep_residual)
    terms = {name: arena_nbytes(needed) for name, needed in sizes.items()}
    second = state_sizes(layout, keep_residual=keep_residual, units=ahead)
    spare = sum(arena_nbytes(needed) for needed in second.values())
    return {**terms, "second copies": spare} if spare else terms


class State:
    """Flat host tensors per unit: weight bf16 [numel], residual int16, exp_avg and exp_avg_sq fp32 [train_numel].

    twins: per tile of the units updated ahead, its two copies. Between steps all tiles of a unit have the same one
    current; `weight`, `residual` and `moments` are then the state, one entry a unit.
    """

    def __init__(
        self,
        layout: Layout,
        device: Device,
        kernels: HostKernels,
        *,
        keep_residual: bool,
        ahead: tuple[int, ...] = (),
    ) -> None:
        """keep_residual: frozen parameters keep their residual plane too (fp32 compute reads it). ahead: units with a
        second copy."""
        self.layout, self._kernels = layout, kernels
        self.arenas: list[Arena] = []
        every = range(len(layout.units))
        self._copies = [[planes] for planes in self._take(every, device, keep_residual=keep_residual)]
        second = self._take(ahead, device, keep_residual=keep_residual, prefix="second ")
        self.twins: dict[tuple[int, int], Twin] = {}
        for unit, planes in zip(ahead, second, strict=True):
            self._copies[unit].append(planes)
            for tile in layout.tiles(unit, trained=True):
                whole = layout.tiles(unit)[tile.index]
                parts = (Planes(*(p[whole.start : whole.stop] for p in copy)) for copy in self._copies[unit])
                self.twins[unit, tile.index] = Twin(*parts)

    def _take(self, units: Sequence[int], device: Device, *, keep_residual: bool, prefix: str = "") -> list[Planes]:
        sizes = state_sizes(self.layout, keep_residual=keep_residual, units=units)
        arenas = {name: Arena.of(needed, prefix + name) for name, needed in sizes.items()}
        columns = [[arenas[name].take(*one) for one in needed] for name, needed in sizes.items()]
        taken = [Planes(*row) for row in zip(*columns, strict=True)]
        for planes in taken:  # touched now, so that no step pays for the pages
            planes.exp_avg.zero_()
            planes.exp_avg_sq.zero_()
        arenas["weights"].page_lock(device)
        if keep_residual:
            arenas["residuals"].page_lock(device)
        self.arenas += arenas.values()
        return taken

    def _current(self, unit: int) -> Planes:
        twin = self.twins.get((unit, 0))
        return self._copies[unit][0 if twin is None else twin.index]

    @property
    def weight(self) -> list[torch.Tensor]:
        return [self._current(u).weight for u in range(len(self._copies))]

    @property
    def residual(self) -> list[torch.Tensor]:
        return [self._current(u).residual for u in range(len(self._copies))]

    @property
    def moments(self) -> list[Moments]:
        return [Moments(*self._current(u)[2:]) for u in range(len(self._copies))]

    def planes(self, unit: int) -> Planes:
        """The unit's current state itself, no copy. Of it, residuals and moments end where the trained part ends."""
        return self._current(unit)

    def restore(self, unit: int, plane: PlaneName, offset: int, values: torch.Tensor) -> None:
        """Set elements of one plane, bit for bit. values: 1-D, of the plane's dtype, host."""
        for planes in self._copies[unit]:  # both, so that it does not matter which one is current
            target: torch.Tensor = getattr(planes, plane)
            assert values.dtype is target.dtype, f"{plane} is {target.dtype}, not {values.dtype}"
            target[offset : offset + values.numel()].copy_(values)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arenas)

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        """Set master weights [offset, offset + len) of a unit. values: 1-D, any float dtype, host."""
        for start in range(0, values.numel(), PIECE_NUMEL):
            piece = values[start : start + PIECE_NUMEL].float().contiguous()
            begin, end = offset + start, offset + start + piece.numel()
            for planes in self._copies[unit]:  # both: what is frozen in a second copy is never written again
                residual = planes.residual[begin:end]
                if residual.numel() == piece.numel():
                    self._kernels.split(piece, planes.weight[begin:end], residual)
                else:  # the frozen end of the unit has no residual plane
                    scratch = torch.empty(piece.numel(), dtype=torch.int16)
                    self._kernels.split(piece, planes.weight[begin:end], scratch)
                    residual.copy_(scratch[: residual.numel()])

    def read(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Master weights [start, stop) of a unit as a new fp32 [stop - start]. Where there is no residual: the bf16."""
        planes = self._current(unit)
        out = planes.weight[start:stop].float()
        with_residual = min(stop, planes.residual.numel())
        if with_residual > start:
            both = planes.weight[start:with_residual], planes.residual[start:with_residual]
            self._kernels.join(*both, out[: with_residual - start])
        return out
