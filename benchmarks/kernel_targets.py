"""What is asked of the kernels, worked out from the lines of one call of kernels.py. A target that the call has no
lines for is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rules import Line
from targets import Target

TIME, MEMORY, BANDWIDTH, PACKED, PRODUCT = 1.02, 1.0, 0.80, 1.10, 1.0
OFF = 0.025
"""Relative, of a whole gradient of a block in bf16: ~20 roundings of 2^-9 in quadrature on either side, twice that."""


def targets(lines: Sequence[Line]) -> Iterator[Target]:
    """Of each shape and op: time and memory over Liger's, share of the copy's bandwidth, one packed row over many."""
    ops: dict[tuple[str, str, str], dict[str, Line]] = {}
    for line in lines:
        ops.setdefault((line["shape"], line["op"], line["detail"]), {})[line["impl"]] = line
    for (shape, op, detail), impls in ops.items():
        name = f"{shape}, {op} ({detail})"
        ours, liger = impls.get("ours"), impls.get("liger")
        if ours is not None and liger is not None:
            yield Target(f"{name}, time over Liger's", _ms(ours) / _ms(liger), TIME)
            yield from _memory(f"{name}, memory over Liger's", ours, liger)
        if ours is not None and ours.get("gbps"):
            yield Target(f"{name}, share of the copy's bandwidth", ours["of_limit"], BANDWIDTH, least=True)
        if "ours sliced" in impls and liger is not None:
            yield from _memory(f"{name}, by slices, memory over Liger's", impls["ours sliced"], liger)
        for impl, line in impls.items():
            if line.get("tflops"):  # else FLOPs were counted that nobody made
                yield Target(f"{name}, {impl}, share of the product's rate", line["of_limit"], PRODUCT)
            if line.get("off_by"):
                yield Target(f"{name}, {impl}, gradients off the model's own by", line["off_by"], OFF)
        if "one row" in impls and "rows" in impls:  # uneven samples are other samples, with more attention
            row, rows = impls["one row"], impls["rows"]
            yield Target(f"{name}, one row, time over rows", _ms(row) / _ms(rows), PACKED)
            yield from _memory(f"{name}, one row, memory over rows", row, rows, PACKED)


def _ms(line: Line) -> float:
    return line["ms"]["median"]


def _memory(text: str, line: Line, base: Line, bound: float = MEMORY) -> Iterator[Target]:
    """Where both take any; of none, nothing may be taken."""
    if line["peak_mib"] is None or base["peak_mib"] is None:
        return
    if base["peak_mib"]:
        yield Target(text, line["peak_mib"] / base["peak_mib"], bound)
    else:
        yield Target(f"{text}, which is none: MiB", line["peak_mib"], 0.0)
