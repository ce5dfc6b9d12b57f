"""Which units a deferred program updates ahead of the verdict, each at the price of a second copy of its state.

After the verdict the other units are updated in the order of the next forward, under it. So those at the top, which
the forward reaches last, can wait; those at the bottom cannot, and their gradients land last, when the update lane is
free to keep up with backward.
"""

from __future__ import annotations

from slideformer.layout import Layout, UnitKind

SLACK = 0.08
"""Share of a forward pass that an update may hold it up: 2% of a step, which takes about four times as long."""


def choose_ahead(
    layout: Layout, *, update_per_forward: float, room_numel: int, resident: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The fewest units, in forward order, so that updates of the others hardly hold up the forward.

    update_per_forward: how many times longer a parameter's update takes than its share of a forward pass.
    room_numel: parameters that there is memory for a second copy of; when it is short, the first units get it.
    resident: units that are updated on the device.
    """
    trained = [i for i, u in enumerate(layout.units) if u.train_numel and i not in resident]
    needed_at = []
    passed = 0.0
    for unit in layout.units:
        needed_at.append(passed)
        passed += unit.numel if unit.kind is UnitKind.BLOCK else 0
    needed_at = [at + SLACK * passed for at in needed_at]
    first = 0
    while first < len(trained) and not _hidden(layout, trained[first:], needed_at, update_per_forward):
        first += 1
    chosen, used = [], 0
    for unit in trained[:first]:
        used += layout.units[unit].numel
        if used > room_numel:
            break
        chosen.append(unit)
    return tuple(chosen)


def _hidden(layout: Layout, units: list[int], needed_at: list[float], update_per_forward: float) -> bool:
    """Whether each of these, updated one after the other from the start of the forward, is done when it is needed."""
    done = 0.0
    for unit in units:
        done += layout.units[unit].train_numel * update_per_forward
        if done > needed_at[unit]:
            return False
    return True
