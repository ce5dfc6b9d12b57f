"""Copies of units' state in host memory, from which a checkpoint is written while training changes the state itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch

from slideformer.engine.fit import spare_room
from slideformer.layout import Layout
from slideformer.memory.host import Arena, arena_nbytes
from slideformer.memory.state import PlaneName, State

PLANES: tuple[PlaneName, ...] = get_args(PlaneName)
SPARE_SHARE = 0.5
"""Of what is free: the page cache and other programs live from the rest, and what they will need is not known here."""


def spare_nbytes() -> int:
    """Half of the host memory that neither this process nor any other uses; page cache counts as unused."""
    return int(SPARE_SHARE * spare_room(None))


class Snapshot:
    """One unit's state as it was at the last `take`; `part` and `extent` as `State` has them."""

    def __init__(self, layout: Layout, unit: int, state: State) -> None:
        """Raises DoesNotFit when the kernel refuses the address space. Touches nothing yet."""
        self._unit, self._piece_numel = unit, layout.tile_numel
        extents = {plane: state.extent(unit, plane) for plane in PLANES}
        self._arena = Arena.of(extents.values(), "a checkpoint's copy")
        self._planes = {plane: self._arena.take(*extent) for plane, extent in extents.items()}

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    def populate(self, wanted: Callable[[], bool]) -> None:
        """Take the memory, as long as it is wanted, so that no `take` waits for the kernel to find it."""
        self._arena.populate(wanted)

    @staticmethod
    def nbytes_of(unit: int, state: State) -> int:
        return arena_nbytes(state.extent(unit, plane) for plane in PLANES)

    def take(self, state: State) -> None:
        """Copy. The unit's state must not change meanwhile."""
        for plane, tensor in self._planes.items():
            for start in range(0, tensor.numel(), self._piece_numel):  # of what is on a device, `part` makes a copy
                stop = min(start + self._piece_numel, tensor.numel())
                tensor[start:stop].copy_(state.part(self._unit, plane, start, stop))

    def extent(self, unit: int, plane: PlaneName) -> tuple[int, torch.dtype]:
        assert unit == self._unit, f"a copy of unit {self._unit}, not of {unit}"
        return self._planes[plane].numel(), self._planes[plane].dtype

    def part(self, unit: int, plane: PlaneName, start: int, stop: int) -> torch.Tensor:
        assert unit == self._unit, f"a copy of unit {self._unit}, not of {unit}"
        return self._planes[plane][start:stop]
