"""What lives on the device beside the window: state of units, saved inputs, kept graphs, late gradients; by the clock.

Memory of the device is filled in several orders, each as far as it goes; the plan that the virtual clock finds fastest
is taken. Pure arithmetic on a layout, options and costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from slideformer.engine.costs import Costs, cost_of
from slideformer.engine.fit import Budgets
from slideformer.engine.options import EngineOptions
from slideformer.layout import Layout, UnitKind
from slideformer.memory import home_nbytes
from slideformer.schedule import StepOptions, build_step, joined_step_s

MARGIN = 0.04
"""Share of the device's memory that is left to the allocator: it hands out whole pieces, and leaves gaps."""

TOLERANCE = 1.005
"""Plans that differ by less are alike to the clock; of those the one that leaves most on the device is taken: what does
not move cannot come late."""


LATE_SHARES = ((1, 4), (1, 3), (1, 2), (2, 3), (3, 4))
"""Blocks out of as many, tried in turn."""


@dataclass(frozen=True, slots=True)
class Room:
    """The device's memory for one model and batch. nbytes: what there is; costs: also of working memory. budgets: of
    them, where somebody has asked already."""

    layout: Layout
    options: EngineOptions
    costs: Costs
    hidden_size: int
    dtype: torch.dtype
    nbytes: int
    budgets: Budgets | None = field(default=None, compare=False, repr=False)

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

    def step_s(self, options: EngineOptions) -> float:
        """Of joined steps, on the virtual clock. Micro-batches are taken to be one that takes as long as all of them:
        they follow each other through a unit anyway, and plans are built much faster."""
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
        return joined_step_s(plan, cost_of(self.layout, shape, self.costs.times(num)))


def place(room: Room) -> EngineOptions:
    """The options with everything decided that was "auto": resident, keep, saved_on_device, late, sliced_head.

    What was given stays as it is. Where not even the window fits, nothing is placed beside it.
    """
    options = room.options
    base = replace(
        options,
        saved_on_device=0 if options.saved_on_device == "auto" else options.saved_on_device,
        resident=options.step_options(room.layout, room.dtype).resident,
        keep=() if options.keep == "auto" else options.keep,
        late=() if options.late == "auto" and options.update == "deferred" else options.late,
    )
    if options.sliced_head == "auto":
        base = replace(base, sliced_head=False)
        too_large = not room.costs.whole_head or room.used(base) > room.limit
        if too_large and room.layout.output not in base.resident:
            base = replace(base, sliced_head=True)
    if room.used(base) > room.limit:
        return replace(base, late=() if base.late == "auto" else base.late)
    trials: dict[EngineOptions, float] = {}
    for order in _orders(room, base):
        filled = _fill(room, base, order)
        if filled not in trials:
            trials[filled] = room.step_s(filled)
    fastest = min(trials.values())
    good = [trial for trial, seconds in trials.items() if seconds <= TOLERANCE * fastest]
    chosen = max(good, key=room.used)
    return _with_late(room, chosen) if chosen.late == "auto" else chosen


def _with_late(room: Room, options: EngineOptions) -> EngineOptions:
    """With the update of every second block put off until backward is over, or of every third and so on, if that is
    faster. The lowest blocks are never late: the next step begins with them."""
    best = replace(options, late=())
    best_s = room.step_s(best)
    resident = best.step_options(room.layout, room.dtype).resident
    choice = [u for u in room.layout.blocks if u not in resident][options.window :]
    for one_of, out_of in LATE_SHARES if options.update == "eager" else ():
        trial = replace(options, late=tuple(u for i, u in enumerate(choice) if i % out_of < one_of))
        if room.used(trial) <= room.limit and (trial_s := room.step_s(trial)) < best_s / TOLERANCE:
            best, best_s = trial, trial_s
    return best


Item = tuple[str, int]
"""("saved", how many more), ("resident", unit), ("keep", unit)."""


def _orders(room: Room, base: EngineOptions) -> Iterator[list[Item]]:
    """What to give the device's memory to, first things first.

    Units in the order in which a step's joint waits for them: vocabulary matrices, small units, then blocks from the
    bottom, whose updates end last and whose weights the next step needs first.
    """
    layout, options = room.layout, room.options
    ends = [u for u in range(len(layout.units)) if layout.units[u].kind is not UnitKind.BLOCK]
    ends = [u for u in ends if not (base.sliced_head and u == layout.output)]
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
    hidden_nbytes = base.batch_shape(room.hidden_size, room.dtype).micro_tokens * room.hidden_size * room.dtype.itemsize
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
