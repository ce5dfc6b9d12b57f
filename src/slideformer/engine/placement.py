"""What lives on the device beside the window: state of units, saved inputs, kept graphs, late gradients; by the clock.

Memory of the device is filled in several orders, each as far as it goes; the plan that the virtual clock finds fastest
is taken. Pure arithmetic on a layout, options and costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from slideformer.engine.ahead import units_ahead
from slideformer.engine.costs import Costs, cost_of
from slideformer.engine.fit import Budgets
from slideformer.engine.offload import spread
from slideformer.engine.options import EngineOptions
from slideformer.engine.window import with_window
from slideformer.layout import Layout, UnitKind
from slideformer.memory import home_nbytes
from slideformer.schedule import StepOptions, build_step, joined_step_s

MARGIN = 0.04
"""Share of the device's memory that is left to the allocator: it hands out whole pieces, and leaves gaps."""

TOLERANCE = 1.005
"""Plans that differ by less are alike to the clock; of those the one that leaves most on the device is taken: what does
not move cannot come late."""


LATE_SHARES = ((1, 8), (1, 4), (1, 3), (1, 2), (2, 3))
"""Streamed blocks out of as many whose update is put off until backward is over, tried in turn."""

BLOCK_SHARES = (0.9, 0.75, 0.5)
"""Of the resident blocks that have room."""

SLICED_OVER = 1.05
"""How much faster the clock must find a sliced head, where the whole has room too: starts of one run should choose
alike. Costs that differ by 3% change the ratio by 0.05 where compute sets the pace (3B, 16 x 1024, 16 GiB: 0.97 to
1.04), by 0.01 where updates do (1B, 3B, 4 x 1024, 6 to 16 GiB: 1.07 to 1.2); by the clock, H200's rates, 2026-11-30."""

TRIED_TILES, FEW_TRIALS = 20_000, 10
"""Tiles of the plans that are simulated, together: 40 plans of an 8B model, two seconds of one core. Where that is no
more than so many plans, no patterns are tried (123B in tiles of 16 Mi elements: two seconds a plan and its bytes)."""

KEPT_STARTS = 2
"""Patterns that are looked around from."""


@dataclass(frozen=True, slots=True)
class Room:
    """The device's memory for one model and batch. nbytes: what there is; costs: also of working memory. budgets: of
    them, where somebody has asked already. host_nbytes: what the host may give, for updates ahead (None: nothing)."""

    layout: Layout
    options: EngineOptions
    costs: Costs
    hidden_size: int
    dtype: torch.dtype
    nbytes: int
    budgets: Budgets | None = field(default=None, compare=False, repr=False)
    host_nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.budgets is None:
            found = Budgets(self.layout, hidden_size=self.hidden_size, dtype=self.dtype, costs=self.costs)
            object.__setattr__(self, "budgets", found)

    def used(self, options: EngineOptions) -> int:
        """Bytes on the device."""
        assert self.budgets is not None
        return self.budgets.of(options).device_nbytes

    @property
    def limit(self) -> int:
        return int(self.nbytes * (1 - MARGIN))

    def _ahead(self, options: EngineOptions) -> tuple[int, ...]:
        if self.host_nbytes is None or options.update == "eager":
            return ()
        assert self.budgets is not None
        spare_nbytes = self.host_nbytes - self.budgets.of(options).host_nbytes
        return units_ahead(self.layout, options, spare_nbytes, self.costs)

    def step_s(self, options: EngineOptions, clipped: bool = False) -> float:
        """Of joined steps, on the virtual clock. clipped: see `cost_of`. Micro-batches are taken to be one that takes
        as long as all of them: they follow each other through a unit anyway, and plans are built much faster."""
        if options.ahead == "auto":
            options = replace(options, ahead=self._ahead(options))
        num = options.micro_batches
        saved = options.saved_on_device
        one = replace(
            options,
            micro_batches=1,
            micro_batch_size=num * options.micro_batch_size,
            saved_on_device=saved // num if isinstance(saved, int) else saved,
        )
        plan = build_step(self.layout, one.step_options(self.layout, self.dtype))
        shape = one.batch_shape(self.hidden_size, self.dtype)
        return joined_step_s(plan, cost_of(self.layout, shape, self.costs.times(num), clipped=clipped))


def place(room: Room) -> EngineOptions:
    """The options with everything decided that was "auto": window, resident, keep, saved_on_device, late, sliced_head.

    What was given stays as it is. Where not even the window fits, nothing is placed beside it.
    """

    def beside(options: EngineOptions) -> EngineOptions:
        return _beside_the_window(replace(room, options=options))

    return with_window(room.options, beside, lambda found: room.used(found) <= room.limit)


def _beside_the_window(room: Room) -> EngineOptions:
    options = room.options
    base = replace(
        options,
        saved_on_device=0 if options.saved_on_device == "auto" else options.saved_on_device,
        resident=options.step_options(room.layout, room.dtype).resident,
        keep=() if options.keep == "auto" else options.keep,
        late=() if options.late == "auto" and options.update == "deferred" else options.late,
    )
    if options.sliced_head != "auto":
        return _placed(room, base)
    whole, sliced = (replace(base, sliced_head=value) for value in (False, True))
    if room.costs.head is None or room.used(whole) > room.limit:
        return _placed(room, whole if room.layout.output in base.resident else sliced)
    found = _placed(room, whole)
    if room.layout.output in base.resident or len(found.resident) == len(room.layout.units) or _Trials(room).few:
        return found
    other = _placed(room, sliced)  # which leaves more to other things
    return other if room.step_s(other) * SLICED_OVER < room.step_s(found) else found


def _placed(room: Room, base: EngineOptions) -> EngineOptions:
    if room.used(base) > room.limit:
        return replace(base, late=() if base.late == "auto" else base.late)
    trials = _Trials(room)
    for order in _orders(room, base):
        trials.try_(_fill(room, base, order))
    if trials.few:
        _put_off(room, trials)
    else:
        _look_around(room, base, trials)
    return trials.chosen()


def _put_off(room: Room, trials: _Trials) -> None:
    """Try late updates of some blocks of the best."""
    best = trials.chosen()
    for share in _lates(room):
        trial = replace(best, late=_late(room, best, share))
        trials.try_(trial if trials.fits(trial) else None)


def _lates(room: Room) -> tuple[tuple[int, int], ...]:
    return LATE_SHARES if room.options.late == "auto" and room.options.update == "eager" else ()


def _late(room: Room, options: EngineOptions, share: tuple[int, int]) -> tuple[int, ...]:
    """So many of the streamed blocks. The lowest are never late: the next step begins with them."""
    streamed = [u for u in room.layout.blocks if u not in options.resident][options.slots :]
    return tuple(u for i, u in enumerate(streamed) if i % share[1] < share[0])


class _Trials:
    """Placements that fit, by the clock; of a model of many tiles fewer, since the clock takes as long as its plan."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._seconds: dict[EngineOptions, float] = {}
        self._used: dict[EngineOptions, int] = {}
        tiles = sum(len(room.layout.tiles(u)) for u in range(len(room.layout.units)))
        self._left = max(TRIED_TILES // tiles, FEW_TRIALS)
        self.few = self._left == FEW_TRIALS

    @property
    def spent(self) -> bool:
        return self._left == 0

    def used(self, options: EngineOptions) -> int:
        if options not in self._used:
            self._used[options] = self.room.used(options)
        return self._used[options]

    def fits(self, options: EngineOptions) -> bool:
        return self.used(options) <= self.room.limit

    def try_(self, options: EngineOptions | None) -> float:
        """Seconds of a step; infinite for what does not fit (None), and for what is not tried any more."""
        if options is None:
            return math.inf
        if options.late == "auto":
            options = replace(options, late=())
        if options not in self._seconds:
            if self.spent:
                return math.inf
            self._left -= 1
            self._seconds[options] = self.room.step_s(options)
        return self._seconds[options]

    def chosen(self) -> EngineOptions:
        """Of the fastest, the one that leaves most on the device."""
        fastest = min(self._seconds.values())
        good = [trial for trial, seconds in self._seconds.items() if seconds <= TOLERANCE * fastest]
        return max(good, key=self.used)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Part of a placement: of the units around the blocks, how many are resident; how many blocks, and whether the
    lowest or spread over the model; and which share of the others is updated late."""

    ends: int
    spread: bool
    num_blocks: int
    late: tuple[int, int] | None = None


class _Patterns:
    """Placements by pattern, each with as many saved inputs as have room beside."""

    def __init__(self, room: Room, base: EngineOptions, trials: _Trials) -> None:
        self.room, self.base, self.trials = room, base, trials
        self.free = room.options.resident == "auto"
        self.ends = _ends(room, base) if self.free else []
        self._made: dict[_Pattern, EngineOptions | None] = {}

    def seconds(self, pattern: _Pattern) -> float:
        return self.trials.try_(self.made(pattern))

    def made(self, pattern: _Pattern) -> EngineOptions | None:
        """None where there is no room."""
        if pattern not in self._made:
            found = self._without_saved(pattern)
            self._made[pattern] = self._with_saved(found) if self.trials.fits(found) else None
        return self._made[pattern]

    def most(self, pattern: _Pattern) -> _Pattern:
        """With as many blocks as have room. Counted by their bytes, then by the budget itself."""
        blocks, room = self.room.layout.blocks, self.room
        left = room.limit - self.trials.used(self._without_saved(replace(pattern, num_blocks=0)))
        num = 0
        for unit in self._ordered(pattern) if self.free else ():
            left -= _resident_nbytes(room, unit)
            num += left >= 0
        while num < len(blocks) * self.free and self._fits(replace(pattern, num_blocks=num + 1)):
            num += 1
        while num > 0 and not self._fits(replace(pattern, num_blocks=num)):
            num -= 1
        return replace(pattern, num_blocks=num)

    def _fits(self, pattern: _Pattern) -> bool:
        return self.trials.fits(self._without_saved(pattern))

    def _ordered(self, pattern: _Pattern) -> list[int]:
        blocks = self.room.layout.blocks
        return spread(blocks) if pattern.spread else list(blocks)

    def _without_saved(self, pattern: _Pattern) -> EngineOptions:
        base, blocks = self.base, self._ordered(pattern)[: pattern.num_blocks]
        resident = tuple(sorted({*base.resident, *self.ends[: pattern.ends], *blocks}))
        found = replace(base, resident=resident, late=() if base.late == "auto" else base.late)
        return found if pattern.late is None else replace(found, late=_late(self.room, found, pattern.late))

    def _with_saved(self, found: EngineOptions) -> EngineOptions:
        room = self.room
        if room.options.saved_on_device != "auto":
            return found
        left = room.limit - self.trials.used(found)
        num = min(left // _hidden_nbytes(room, found), found.most_saved(room.layout))
        while num > 0 and not self.trials.fits(replace(found, saved_on_device=num)):
            num -= 1
        return replace(found, saved_on_device=num)


def _look_around(room: Room, base: EngineOptions, trials: _Trials) -> None:
    """Try patterns: first how residents lie, then, from the best of those, what is late and how many there are."""
    patterns = _Patterns(room, base, trials)
    lates = _lates(room)
    numbers = sorted({0, min(1, len(patterns.ends)), len(patterns.ends)}, reverse=True)
    starts: list[tuple[float, _Pattern]] = []
    for num, apart in product(numbers, (True, False)):
        if not trials.spent:
            start = patterns.most(_Pattern(num, apart, 0))
            starts.append((patterns.seconds(start), start))
    for _, start in sorted(starts, key=lambda pair: pair[0])[:KEPT_STARTS]:
        found = [start, *(patterns.most(replace(start, late=late)) for late in lates if not trials.spent)]
        best = min(found, key=patterns.seconds)
        fewer = [replace(best, num_blocks=int(share * start.num_blocks)) for share in BLOCK_SHARES]
        best = min((best, *fewer), key=patterns.seconds)
        for late in lates:
            patterns.seconds(replace(best, late=late))


def _ends(room: Room, base: EngineOptions) -> list[int]:
    """Units around the blocks that may be resident, vocabulary matrices first."""
    layout = room.layout
    found = [u for u in range(len(layout.units)) if layout.units[u].kind is not UnitKind.BLOCK]
    return [u for u in found if not (base.sliced_head and u == layout.output)]


def _hidden_nbytes(room: Room, base: EngineOptions) -> int:
    return base.batch_shape(room.hidden_size, room.dtype).micro_tokens * room.hidden_size * room.dtype.itemsize


Item = tuple[str, int]
"""("saved", how many more), ("resident", unit), ("keep", unit)."""


def _orders(room: Room, base: EngineOptions) -> Iterator[list[Item]]:
    """What to give the device's memory to, first things first.

    Units in the order in which a step's joint waits for them: vocabulary matrices, small units, then blocks from the
    bottom, whose updates end last and whose weights the next step needs first.
    """
    layout, options = room.layout, room.options
    ends = _ends(room, base)
    resident: list[Item] = [("resident", u) for u in (*ends, *layout.blocks)] if options.resident == "auto" else []
    keep: list[Item] = [("keep", u) for u in reversed(layout.blocks)] if options.keep == "auto" else []
    saved: list[Item] = [("saved", 1)] * options.most_saved(layout) if options.saved_on_device == "auto" else []
    yield []
    yield [*saved, *resident, *keep]
    yield [*resident, *keep, *saved]
    yield [*resident[: len(ends)], *saved, *resident[len(ends) :], *keep]


def _fill(room: Room, base: EngineOptions, order: list[Item]) -> EngineOptions:
    """Takes items as far as they fit. Bytes are first counted item by item, then by the budget itself."""
    layout = room.layout
    left = room.limit - room.used(base)
    hidden_nbytes = _hidden_nbytes(room, base)
    of_block = dict(zip(layout.blocks, room.costs.blocks, strict=True))
    saved = base.saved_on_device
    resident, keep = list(base.resident), list(base.keep)
    taken: list[tuple[Item, int]] = []
    for what, which in order:
        if what == "saved":
            nbytes = hidden_nbytes
        elif what == "resident":
            nbytes = _resident_nbytes(room, which)
        else:
            nbytes = base.micro_batches * of_block[which].kept_nbytes
            if which not in resident:
                continue
        if nbytes > left:
            if what == "saved":
                continue
            break
        left -= nbytes
        taken.append(((what, which), nbytes))
        if what == "resident":
            resident.append(which)

    def chosen_options() -> EngineOptions:
        items = [item for item, _ in taken]
        more = sum(n for what, n in items if what == "saved")
        chosen = replace(
            base,
            resident=tuple(sorted({*base.resident, *(u for what, u in items if what == "resident")})),
            keep=tuple(sorted({*keep, *(u for what, u in items if what == "keep")})),
        )
        if isinstance(saved, int):
            chosen = replace(chosen, saved_on_device=min(saved + more, chosen.most_saved(layout)))
        return chosen

    while taken and (excess := room.used(chosen_options()) - room.limit) > 0:
        while taken and excess > 0:
            excess -= taken.pop()[1]
    return chosen_options()


def _resident_nbytes(room: Room, unit: int) -> int:
    """Device memory that a unit takes when it is resident, beyond what it takes anyway."""
    layout_unit = room.layout.units[unit]
    nbytes = home_nbytes(room.layout, unit, keep_residual=room.dtype is torch.float32)
    if layout_unit.kind is not UnitKind.BLOCK:  # it has a place for its weights and its gradient already
        weights = 0 if layout_unit.kind is UnitKind.TABLE and not room.layout.tied else layout_unit.numel
        return nbytes - weights * room.dtype.itemsize
    return nbytes + (layout_unit.train_numel * room.dtype.itemsize if room.options.update == "deferred" else 0)


def placed(layout: Layout, chosen: StepOptions) -> str:
    """What is on the device, for people."""
    streamed = set(layout.blocks) - set(chosen.resident)
    parts = [f"{min(chosen.window, len(streamed))} of {len(layout.blocks)} blocks at a time"] if streamed else []
    parts.append(f"the state of {len(chosen.resident)} of {len(layout.units)} units")
    parts.append(f"{chosen.hidden_pool} saved inputs")
    if chosen.keep:
        parts.append(f"what {len(chosen.keep)} blocks keep for backward")
    if chosen.late:
        parts.append(f"late gradients of {len(chosen.late)} blocks")
    if chosen.sliced_head:
        parts.append("the output projection in slices")
    return ", ".join(parts)
