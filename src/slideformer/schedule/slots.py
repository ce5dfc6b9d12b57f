"""Which slot serves each visit to a block, and when its weights may be uploaded."""

from __future__ import annotations


def plan_slots(visits: list[int], num_slots: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Which slot serves each visit to a block, and which uploads follow each visit.

    Returns (slot of each visit, uploads): uploads[i + 1] are the (block, slot) pairs whose slot is free after visit i,
    uploads[0] those before the first. A block still in a slot is not uploaded again; the slot whose block is needed
    last is given up first.
    """
    uploads: list[list[tuple[int, int]]] = [[] for _ in range(len(visits) + 1)]
    holds: dict[int, int | None] = dict.fromkeys(range(num_slots))
    last_visit = dict.fromkeys(range(num_slots), -1)
    slots = []
    for i, block in enumerate(visits):
        slot = next((s for s, held in holds.items() if held == block), None)
        if slot is None:

            def next_use(s: int, i: int = i) -> tuple[int, int]:
                later = [j for j in range(i, len(visits)) if visits[j] == holds[s]]
                return (later[0] if later else len(visits), -last_visit[s])

            slot = max(holds, key=next_use)
            uploads[last_visit[slot] + 1].append((block, slot))
            holds[slot] = block
        last_visit[slot] = i
        slots.append(slot)
    return slots, uploads
