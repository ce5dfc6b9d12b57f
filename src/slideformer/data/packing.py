"""Which samples share a row: best-fit decreasing bin packing.

Longest first, each into the fullest row that still has room for it. Source: D. S. Johnson, "Near-optimal bin packing
algorithms", 1973: at most 11/9 of the fewest rows possible, plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Rows of indices into `lengths`, none longer than `capacity` in all. Each index of `order` is in one row.

    order: which of two equally long samples goes first; so which samples meet follows from it, and the number of rows
    does not. Raises ValueError for a length over the capacity.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by room left: rows
    rooms = 0  # bit r: there is a row with room r
    for index in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens is longer than a row of {capacity}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return rows
