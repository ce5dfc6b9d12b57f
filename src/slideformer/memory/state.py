"""The state: both planes of every master weight, and the moments of every trained one; on host, device or disk.

12 bytes a trained parameter (2 + 2 + 4 + 4), and as much again for what is updated ahead. The weight plane is
page-locked and is itself what is uploaded. A frozen parameter has no moments, and under bf16 compute no residual
either: 2 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from slideformer.device import Device
from slideformer.layout import Layout
from slideformer.memory.disk import DiskFolder
from slideformer.memory.host import DEVICE_ALIGN, Arena, aligned, arena_nbytes
from slideformer.memory.stored import DTYPES, Stored
from slideformer.native import HostKernels, Planes
from slideformer.optim import join

PIECE_NUMEL = 1 << 22
"""Elements split or joined at a time when weights are read or written, so that temporaries stay small (16 MiB)."""


PlaneName = Literal["weight", "residual", "exp_avg", "exp_avg_sq"]  # the fields of Planes


class Twin:
    """Two copies of one tile's state. One is current; an update ahead of its verdict writes the other, which becomes
    current. In a clipped step that happens when it has the new weights; it gets the rest from the old one.
    """

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


class Home:
    """All of a resident unit's state, on the device. weights: [numel] in the compute dtype, what the unit runs on: the
    bf16 plane itself, or the master joined from both planes under fp32 compute."""

    __slots__ = ("planes", "weights")

    def __init__(self, planes: Planes, weights: torch.Tensor) -> None:
        self.planes, self.weights = planes, weights

    def refresh(self) -> None:
        """After the planes were written. Launched, not waited for."""
        if self.weights is not self.planes.weight:
            self.weights.copy_(join(self.planes.weight, self.planes.residual))


class Carved:
    """One allocation on the device, handed out front to back: torch's allocator rounds each of many up by as much as a
    MiB, which a budget to the byte would have to know."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises DoesNotFit."""
        self._bytes, self._used = device.empty(nbytes, torch.uint8), 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next [numel], contents undefined. No view of the whole: autograd counts writes to those together."""
        start = self._used
        self._used += aligned(numel * dtype.itemsize, DEVICE_ALIGN)
        assert self._used <= self._bytes.numel(), f"{self._used} bytes of {self._bytes.numel()} asked"
        piece = torch.empty(0, dtype=dtype, device=self._bytes.device)
        return piece.set_(self._bytes.untyped_storage(), start // dtype.itemsize, (numel,))


ARENAS = {"weight": "weights", "residual": "residuals", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
"""What the bytes of each plane are called."""


def plane_numel(layout: Layout, unit: int, plane: str, *, keep_residual: bool) -> int:
    """Elements of a plane of a unit. keep_residual: see `State`."""
    whole = plane == "weight" or (plane == "residual" and keep_residual)
    return layout.units[unit].numel if whole else layout.units[unit].train_numel


def state_sizes(
    layout: Layout, *, keep_residual: bool, units: Iterable[int], disk: Iterable[tuple[str, int]] = ()
) -> dict[str, list[tuple[int, torch.dtype]]]:
    """Lengths and dtypes of every plane and moment in memory, per unit of `units`; those on disk (plane, unit) are of
    length 0."""
    chosen, elsewhere = list(units), frozenset(disk)

    def numel(plane: str, unit: int) -> int:
        return 0 if (plane, unit) in elsewhere else plane_numel(layout, unit, plane, keep_residual=keep_residual)

    return {name: [(numel(plane, u), DTYPES[plane]) for u in chosen] for plane, name in ARENAS.items()}


def home_nbytes(layout: Layout, unit: int, *, keep_residual: bool) -> int:
    """Bytes of a resident unit's `Home`."""
    sizes = [size for (size,) in state_sizes(layout, keep_residual=keep_residual, units=[unit]).values()]
    joined = [(layout.units[unit].numel, torch.float32)] if keep_residual else []
    return sum(aligned(numel * dtype.itemsize, DEVICE_ALIGN) for numel, dtype in (*sizes, *joined))


def state_nbytes(
    layout: Layout,
    *,
    keep_residual: bool,
    ahead: Iterable[int] = (),
    resident: Iterable[int] = (),
    disk: Iterable[tuple[str, int]] = (),
) -> dict[str, int]:
    """Bytes of the host arenas of a `State`, by term."""
    streamed = [u for u in range(len(layout.units)) if u not in set(resident)]
    sizes = state_sizes(layout, keep_residual=keep_residual, units=streamed, disk=disk)
    terms = {name: arena_nbytes(needed) for name, needed in sizes.items()}
    second = state_sizes(layout, keep_residual=keep_residual, units=ahead)
    spare = sum(arena_nbytes(needed) for needed in second.values())
    return {**terms, "second copies": spare} if spare else terms


class State:
    """Flat tensors per unit: weight bf16 [numel], residual int16, exp_avg and exp_avg_sq fp32 [train_numel]. On the
    host; those of resident units on the device (homes: by unit).

    twins: per tile of the units updated ahead, its two copies. Between steps all tiles of a unit have the same one
    current.
    """

    def __init__(
        self,
        layout: Layout,
        device: Device,
        kernels: HostKernels,
        *,
        keep_residual: bool,
        ahead: tuple[int, ...] = (),
        resident: tuple[int, ...] = (),
        disk: tuple[tuple[str, int], ...] = (),
        folder: DiskFolder | None = None,
    ) -> None:
        """keep_residual: frozen parameters keep their residual plane too (fp32 compute reads it), and a home has its
        master joined. ahead: units with a second copy. resident: units whose state is on the device. disk: (plane,
        unit) pairs in files of `folder`, which starts empty. Raises DoesNotFit, BadInput, and what moves planes that
        are in files DiskFault.
        """
        self.layout, self._kernels, self._device = layout, kernels, device
        self._keep_residual = keep_residual
        self.arenas: list[Arena] = []
        self.stored: Stored | None = None
        if disk:
            assert folder is not None, "planes on disk without a folder for them"
            self.stored = Stored(folder, layout, disk, keep_residual=keep_residual)
        self._disk = frozenset(disk)
        self.homes = {unit: self._home(unit, device, keep_residual=keep_residual) for unit in resident}
        streamed = [u for u in range(len(layout.units)) if u not in self.homes]
        taken = self._take(streamed, device, keep_residual=keep_residual, disk=disk)
        self._copies = {unit: [planes] for unit, planes in zip(streamed, taken, strict=True)}
        second = self._take(ahead, device, keep_residual=keep_residual, prefix="second ")
        self.twins: dict[tuple[int, int], Twin] = {}
        for unit, planes in zip(ahead, second, strict=True):
            self._copies[unit].append(planes)
            for tile in layout.tiles(unit, trained=True):
                whole = layout.tiles(unit)[tile.index]
                parts = (Planes(*(p[whole.start : whole.stop] for p in copy)) for copy in self._copies[unit])
                self.twins[unit, tile.index] = Twin(*parts)

    def _take(
        self,
        units: Sequence[int],
        device: Device,
        *,
        keep_residual: bool,
        prefix: str = "",
        disk: tuple[tuple[str, int], ...] = (),
    ) -> list[Planes]:
        sizes = state_sizes(self.layout, keep_residual=keep_residual, units=units, disk=disk)
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

    def _home(self, unit: int, device: Device, *, keep_residual: bool) -> Home:
        sizes = state_sizes(self.layout, keep_residual=keep_residual, units=[unit])
        there = Carved(device, home_nbytes(self.layout, unit, keep_residual=keep_residual))
        planes = Planes(*(there.take(*size) for (size,) in sizes.values()))
        planes.exp_avg.zero_()
        planes.exp_avg_sq.zero_()
        joined = there.take(planes.weight.numel(), torch.float32) if keep_residual else planes.weight
        return Home(planes, joined)

    def _current(self, unit: int) -> Planes:
        if unit in self.homes:
            return self.homes[unit].planes
        twin = self.twins.get((unit, 0))
        return self._copies[unit][0 if twin is None else twin.index]

    def planes(self, unit: int) -> Planes:
        """The unit's current state itself, where it lies: of a resident unit on the device. Residuals and moments end
        where the trained part ends; planes on disk are of length 0."""
        return self._current(unit)

    def extent(self, unit: int, plane: PlaneName) -> tuple[int, torch.dtype]:
        """How many elements a plane of the unit has, and their dtype."""
        return plane_numel(self.layout, unit, plane, keep_residual=self._keep_residual), DTYPES[plane]

    def part(self, unit: int, plane: PlaneName, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of one plane of the unit's current state, as far as it goes: [n], on the host, not to
        be written to: a copy only of what is not there. Blocks; raises DiskFault."""
        if (plane, unit) in self._disk and self.stored is not None:
            return self.stored.part(plane, unit, start, stop)
        tensor: torch.Tensor = getattr(self._current(unit), plane)
        return tensor[start:stop].cpu()

    def restore(self, unit: int, plane: PlaneName, offset: int, values: torch.Tensor) -> None:
        """Set elements of one plane, bit for bit. values: 1-D, of the plane's dtype, host."""
        assert values.dtype is DTYPES[plane], f"{plane} is {DTYPES[plane]}, not {values.dtype}"
        self._put(unit, plane, offset, values)
        self._refresh(unit)

    def _put(self, unit: int, plane: PlaneName, offset: int, values: torch.Tensor) -> None:
        """Wherever it lies, and in every copy, those elements left out that are beyond the end of the plane."""
        if (plane, unit) in self._disk and self.stored is not None:
            self.stored.put(plane, unit, offset, values)
            return
        for planes in self._owned(unit):
            target: torch.Tensor = getattr(planes, plane)[offset : offset + values.numel()]
            target.copy_(values[: target.numel()])

    def flush(self) -> None:
        """What was written or restored is where the lanes find it. Before a step; raises DiskFault."""
        if self.stored is not None:
            self.stored.flush()

    def _refresh(self, unit: int) -> None:
        """What lanes read was written on another stream than theirs: it is there before they start."""
        if unit in self.homes:
            self.homes[unit].refresh()
            self._device.settle()

    def _owned(self, unit: int) -> list[Planes]:
        """All copies, so that it does not matter which one is current; what is frozen in one is never written again."""
        return [self.homes[unit].planes] if unit in self.homes else self._copies[unit]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arenas)

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        """Set master weights [offset, offset + len) of a unit. values: 1-D, any float dtype, host."""
        for start in range(0, values.numel(), PIECE_NUMEL):
            piece = values[start : start + PIECE_NUMEL].float().contiguous()
            weight, rest = (torch.empty(piece.numel(), dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
            self._kernels.split(piece, weight, rest)
            self._put(unit, "weight", offset + start, weight)
            self._put(unit, "residual", offset + start, rest)
        self._refresh(unit)

    def read(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Master weights [start, stop) of a unit as a new fp32 [stop - start]. Where there is no residual: the bf16."""
        weight, residual = (self.part(unit, plane, start, stop) for plane in ("weight", "residual"))
        out = weight.float()
        if residual.numel():
            self._kernels.join(weight[: residual.numel()], residual, out[: residual.numel()])
        return out
