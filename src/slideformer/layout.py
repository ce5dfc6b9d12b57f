"""How a model is cut into units, and each unit into tiles. Integers and strings only.

A unit is what slides: one decoder block, or one of the pieces around the blocks. Its parameters lie one behind the
other in one flat vector, trainable ones first and, among those, the ones that decay first: so what is trained is a
prefix, and what decays is a prefix of that. A tile is a contiguous slice of this vector, the atom of every transfer
and every update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod


class UnitKind(StrEnum):
    """What a unit is for. The order of the members is the order of a forward pass."""

    TABLE = "table"  # the input embedding: rows are gathered on the host, the matrix itself never slides
    GLUE = "glue"  # other parameters that surround the blocks before the first one (GPT-2's positions)
    BLOCK = "block"  # one decoder block
    FINAL = "final"  # final norm, and the bias of the output projection where there is one
    OUTPUT = "output"  # the output projection; absent when it is tied to the table


@dataclass(frozen=True, slots=True)
class Param:
    """One named parameter. `name` is its state-dict name in the Hugging Face model."""

    name: str
    shape: tuple[int, ...]
    decay: bool = True
    trainable: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements [start, stop) of a unit's flat vector."""

    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Unit:
    """One unit. `params` are reordered at construction: decaying, then other trainable, then frozen ones."""

    name: str
    kind: UnitKind
    params: tuple[Param, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.params, key=lambda p: (not p.trainable, not p.decay))
        object.__setattr__(self, "params", tuple(ordered))
        if not ordered:
            raise ValueError(f"unit {self.name} has no parameters")
        if empty := [p.name for p in ordered if p.numel < 1]:
            raise ValueError(f"unit {self.name} has parameters without elements, which cannot be cut: {empty}")
        if self.kind in (UnitKind.TABLE, UnitKind.OUTPUT) and (len(ordered) != 1 or len(ordered[0].shape) != 2):
            raise ValueError(f"unit {self.name} must hold exactly one matrix, found {[p.shape for p in ordered]}")

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First element of each parameter in the flat vector, by name, in flat order."""
        offsets, position = {}, 0
        for param in self.params:
            offsets[param.name] = position
            position += param.numel
        return offsets

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @cached_property
    def train_numel(self) -> int:
        """Length of the trained prefix: what has a gradient, moments and a download."""
        return sum(p.numel for p in self.params if p.trainable)

    @cached_property
    def decay_numel(self) -> int:
        """Length of the prefix that decays."""
        return sum(p.numel for p in self.params if p.trainable and p.decay)

    @property
    def row_numel(self) -> int:
        """Elements of one row of a table or output unit; 1 for every other unit."""
        return self.params[0].shape[1] if self.kind in (UnitKind.TABLE, UnitKind.OUTPUT) else 1


@dataclass(frozen=True)
class Layout:
    """The units of a model in forward order: [table, glue?, block..., final?, output?].

    tile_numel: elements of a tile; tiles of tables are rounded down to whole rows (at least one row).
    tied: the output projection is the table; there is then no output unit.
    """

    units: tuple[Unit, ...]
    tile_numel: int
    tied: bool

    def __post_init__(self) -> None:
        kinds = [u.kind for u in self.units]
        order = list(UnitKind)
        if sorted(kinds, key=order.index) != kinds or kinds.count(UnitKind.BLOCK) < 1 or kinds[:1] != [UnitKind.TABLE]:
            raise ValueError(f"units must be table, glue?, block..., final?, output?; found {[str(k) for k in kinds]}")
        if any(kinds.count(k) > 1 for k in order if k is not UnitKind.BLOCK):
            raise ValueError("only blocks may occur more than once")
        if self.tied == (UnitKind.OUTPUT in kinds):
            raise ValueError("a tied layout has no output unit, an untied one has exactly one")
        if self.tile_numel < 1:
            raise ValueError(f"tile_numel is {self.tile_numel}, must be at least 1")
        names = [p.name for u in self.units for p in u.params]
        if len(set(names)) != len(names):
            raise ValueError(f"parameters covered twice: {sorted({n for n in names if names.count(n) > 1})}")

    @cached_property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @cached_property
    def train_numel(self) -> int:
        return sum(u.train_numel for u in self.units)

    def untrained(self) -> Layout:
        """The same with nothing trained, so that a state for it holds weights and nothing else. Raises ValueError where
        some parameters are frozen already: the others would change their places."""
        if self.train_numel < self.numel:
            raise ValueError("some parameters are frozen; a layout without training is made of one that trains all")
        units = [replace(u, params=tuple(replace(p, trainable=False) for p in u.params)) for u in self.units]
        return replace(self, units=tuple(units))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Indices into `units` of the decoder blocks, in forward order."""
        return tuple(i for i, u in enumerate(self.units) if u.kind is UnitKind.BLOCK)

    def find(self, kind: UnitKind) -> int | None:
        """Index of the only unit of this kind (not for blocks), or None."""
        return next((i for i, u in enumerate(self.units) if u.kind is kind), None)

    @cached_property
    def output(self) -> int:
        """Index of the unit whose matrix projects to the vocabulary: the output unit, or the table when tied."""
        found = self.find(UnitKind.OUTPUT)
        return 0 if found is None else found

    def tiles(self, unit: int, *, trained: bool = False) -> tuple[Tile, ...]:
        """Tiles of a unit's whole vector, or of its trained prefix only. Same cuts either way, but for the last."""
        found = self._cuts.get((unit, trained))
        if found is None:
            u = self.units[unit]
            end = u.train_numel if trained else u.numel
            step = max(self.tile_numel // u.row_numel, 1) * u.row_numel
            found = tuple(Tile(i, a, min(a + step, end)) for i, a in enumerate(range(0, end, step)))
            self._cuts[unit, trained] = found
        return found

    @cached_property
    def _cuts(self) -> dict[tuple[int, bool], tuple[Tile, ...]]:
        """What `tiles` has worked out: it is asked several times for every op of a plan."""
        return {}
