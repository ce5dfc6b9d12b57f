"""The engine equals a plain sequential loop bit for bit, whatever is set, however lanes are delayed."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.toys import DEFERRED, EAGER, engine_on, reference, repeated, run_engine, toy_batch, toy_decoder, toy_options
from families import FAMILIES
from slideformer.device.cpu import CpuDevice

CLIP_OFF = {"update": "deferred", "max_grad_norm": 0.0}
FACTORS = {
    "dtype": (torch.float32, torch.bfloat16),
    "program": (EAGER, DEFERRED, CLIP_OFF),
    "micro_batches": (1, 3),
    "window": (1, 2, 3, 9),
    "grad_slots": (1, 2),
    "ring": (1, 2, 4),
    "tile": (3000, 10000, 10**6),  # 46 rows and a bit, 156 rows, everything at once
    "saved_on_device": (None, 0, 2),  # none is spilled, nearly all, some
    "hidden_ring": (2, 4),
}


def pairwise(factors: dict[str, tuple]) -> list[dict]:
    """A few rows in which every pair of values of two factors occurs. Greedy, always the same."""
    sizes = [len(values) for values in factors.values()]
    places = list(itertools.combinations(range(len(sizes)), 2))
    missing = {(i, a, j, b) for i, j in places for a in range(sizes[i]) for b in range(sizes[j])}
    rows = []
    while missing:
        row: list[int] = []
        for k in range(len(sizes)):
            met = [sum((i, row[i], k, value) in missing for i in range(k)) for value in range(sizes[k])]
            ahead = [sum((k, value) in (p[:2], p[2:]) for p in missing) for value in range(sizes[k])]
            row.append(max(range(sizes[k]), key=lambda value, met=met, ahead=ahead: (met[value], ahead[value])))
        missing -= {(i, row[i], j, row[j]) for i, j in places}
        rows.append({name: values[v] for (name, values), v in zip(factors.items(), row, strict=True)})
    return rows


ROWS = pairwise(FACTORS)
CASES = [
    (family, tied, ROWS[(2 * i + tied) % len(ROWS)]) for i, family in enumerate(FAMILIES) for tied in (False, True)
]
assert len(CASES) >= len(ROWS), "every row is somebody's"


def case_name(case: tuple[str, bool, dict]) -> str:
    family, tied, row = case
    program = row["program"]
    values = [str(v).removeprefix("torch.") for k, v in row.items() if k != "program"]
    return "-".join([family, "tied" if tied else "untied", program["update"], f"{program['max_grad_norm']:g}", *values])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_five_steps_equal_the_sequential_loop_bit_for_bit(case):
    family, tied, row = case
    settings = {k: v for k, v in row.items() if k not in ("dtype", "program", "tile")} | row["program"]
    options = toy_options(**settings)
    decoder = toy_decoder(family, tied=tied, dtype=row["dtype"], tile=row["tile"])
    expected = reference(family, tied, row["dtype"], row["micro_batches"], options.max_grad_norm)
    with engine_on(decoder, options, CpuDevice(jitter_s=5e-4, poison=True, seed=CASES.index(case))) as engine:
        found = run_engine(engine, repeated(toy_batch(row["micro_batches"])))
    assert expected.fall >= 0.5, "the steps must do something"
    assert found == expected
