"""What one op's action may touch: the buffers that its op declares, by role, and nothing else."""

from __future__ import annotations

import torch

from slideformer.memory import Cell, Held, Home, StoredTile, Twin
from slideformer.schedule import Buffer, Op


class Reach:
    """Made once per op of a plan. A role that the op does not declare is a KeyError."""

    __slots__ = ("_held", "_op")

    def __init__(self, op: Op, buffers: dict[Buffer, Held]) -> None:
        self._op = op
        self._held: dict[str, list[Held]] = {}
        for access in op.accesses:
            self._held.setdefault(access.role, []).append(buffers[access.buffer])

    def __contains__(self, role: str) -> bool:
        return role in self._held

    def __getitem__(self, role: str) -> torch.Tensor:
        """The tensor of a role that the op declares once; of state that has two copies, the current one's; of a
        resident unit, its weights."""
        (held,) = self._held[role]
        if isinstance(held, Home):
            return held.weights
        if isinstance(held, Twin):
            held = getattr(held.current, role)
        assert isinstance(held, torch.Tensor)
        return held

    def tensors(self, role: str) -> list[torch.Tensor]:
        """The tensors of a role that the op may declare several times, in its order."""
        return [held for held in self._held[role] if isinstance(held, torch.Tensor)]

    def stored(self, role: str) -> StoredTile:
        (held,) = self._held[role]
        assert isinstance(held, StoredTile)
        return held

    def staged(self) -> list[tuple[StoredTile, torch.Tensor]]:
        """Of an op between disk and host: each tile in a file, and the memory that it is staged in."""
        names = dict.fromkeys(role.removeprefix("staged_") for role in self._held)
        return [(self.stored(name), self[f"staged_{name}"]) for name in names]

    def twin(self, role: str) -> Twin:
        (held,) = self._held[role]
        assert isinstance(held, Twin)
        return held

    def home(self, role: str) -> Home:
        (held,) = self._held[role]
        assert isinstance(held, Home)
        return held

    def cell(self, role: str) -> Cell:
        (held,) = self._held[role]
        assert isinstance(held, Cell)
        return held

    def cells(self, role: str) -> list[Cell]:
        """Of a role that the op may declare several times, in its order."""
        return [held for held in self._held[role] if isinstance(held, Cell)]

    def writes(self, role: str) -> bool:
        return any(a.leaves is not None for a in self._op.accesses if a.role == role)
