"""Prints results as a table and says what does not add up.

    python benchmarks/report.py FILE [--run ID] [--markdown] [--targets]

One table a call: every case beside the stock model's forward and backward of the same call. Exits with 1, with a
sentence for each fault, where a line is not what it says (rules.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rules import Line, call_faults, ceiling_of, line_faults, loss_difference, name_of

COLUMNS = ("case", "step s", "min-max", "predicted", "x fwd+bwd", "tokens/s", "TFLOP/s", "GPU GiB", "host GiB")
COLUMNS += ("B/param up, down", "loss off by", "busy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", help="of this call alone")
    parser.add_argument("--markdown", action="store_true", help="tables for docs/performance.md")
    parser.add_argument("--targets", action="store_true", help="say which targets each call meets")
    args = parser.parse_args()
    return report(args.file, run=args.run, markdown=args.markdown, targets=args.targets)


def report(path: Path, *, run: str | None = None, markdown: bool = False, targets: bool = False) -> int:
    """Print the tables of a file. Returns 1 where something does not add up, 2 for a file without lines."""
    lines = read(path) if path.exists() else []
    calls: dict[str, list[Line]] = {}
    for line in lines:
        if run in (None, line.get("run")):
            calls.setdefault(str(line.get("run")), []).append(line)
    if not calls:
        print(f"{path} has no results{f' of run {run}' if run else ''}", file=sys.stderr)
        return 2
    faults = []
    for name, call in calls.items():
        sound, found = sift(call)
        faults += [f"run {name} {fault}" for fault in found]
        print(table(sound, markdown=markdown) if sound else f"run {name}: no line that adds up")
        if targets:
            from targets import verdicts

            print("\n".join(verdicts(sound)))
    for fault in faults:
        print(f"does not add up: {fault}", file=sys.stderr)
    return 1 if faults else 0


def read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def sift(call: list[Line]) -> tuple[list[Line], list[str]]:
    """The lines of a call that add up, and the faults of the others and of the call."""
    sound, faults = [], []
    for line in call:
        found = list(line_faults(line))
        faults += [f"{line.get('case')}: {fault}" for fault in found]
        if not found:
            sound.append(line)
    return sound, [*faults, *call_faults(sound)]


def table(lines: list[Line], *, markdown: bool = False) -> str:
    """Of one call."""
    first = next((line for line in lines if line["bench"] == "step"), lines[0])
    head = f"{first['shape']}, {first['batch']} x {first['seq']} tokens, " if first["bench"] == "step" else ""
    head += (
        f"{first['gpu'] or first.get('machine')}, torch {first['torch']}, commit {first['commit']}, run {first['run']}"
    )
    steps = [line for line in lines if line["bench"] == "step"]
    rows = [COLUMNS, *_rows(steps)] if steps else []
    text = _markdown(rows) if markdown else _plain(rows)
    others = [_rate(line) for line in lines if line["bench"] != "step"]
    return "\n".join([head, "", *text, *others, ""])


def _rows(lines: list[Line]) -> Iterator[tuple[str, ...]]:
    base = next((line for line in lines if line["case"] == "stock-fwd-bwd"), None)
    for line in lines:
        times, moved, ceiling = line["step_s"], line["bytes"], ceiling_of(line, lines)
        compared = ceiling is not None and line["case"] != "stock-fwd-bwd"
        yield (
            name_of(line),
            f"{times['median']:.4g}",
            f"{times['min']:.4g}-{times['max']:.4g}",
            f"{line['predicted_step_s']:.4g}" if line["predicted_step_s"] else "",
            f"{times['median'] / base['step_s']['median']:.3f}" if base else "",
            f"{line['tokens_per_second']:.0f}",
            f"{line['tflops']:.4g}",
            f"{line['gpu_peak_gib']:.2f}",
            f"{line['host_peak_gib']:.2f}",
            f"{moved['up'] / line['params']:.2f}, {moved['down'] / line['params']:.2f}" if moved else "",
            f"{loss_difference(line, ceiling):.1e}" if compared and line is not ceiling else "",
            " ".join(f"{lane} {share:.0%}" for lane, share in line["busy"].items() if share >= 0.005),
        )


def _rate(line: Line) -> str:
    if line["bench"] == "optimizer":
        beside = f" beside a stream of {line['stream_gbps']} GB/s" if line["stream_gbps"] else ""
        rate = f"{line['gparam_per_s']} Gparam/s, {line['gbps']} GB/s{beside}"
        return f"{line['case']}, {line['cpu_threads']} threads: {rate}"
    if line["bench"] == "kernels":  # kernels.py has a table of its own for these
        return f"{line['case']}, {line['shape']}, {line['batch']} x {line['seq']}: {line['ms']['median']} ms"
    if line["bench"] == "reach":
        return f"reach of {line['case']}, {line['shape']}: {line['over']} {line['largest']}"
    if line["bench"] in ("sweep", "product"):
        what = f"{line['bench']} {line['case']}, {line['shape']}, {line['batch']} x {line['seq']}"
        limit = f", {line['gpu_limit_gib']:g} GiB" if line["gpu_limit_gib"] else ""
        return f"{what}{limit}: {line['step_s']['median']:.4g} s"
    if line["bench"] == "host_memory":
        falls = f"{line['planned_fall_gib']} GiB less planned, {line['resident_fall_gib']} measured"
        return f"host memory, {line['case']}, {line['shape']}: {line['resident_gib']} GiB, {falls}"
    if line["bench"] == "generate":
        share = f"{line['ratio']} of prompts x {line['link_gbps']} GB/s / bytes of the weights"
        shown = f"{line['case']}, {line['shape']}, {line['batch']} prompts of {line['seq']} tokens"
        return f"{shown}: {line['tokens_per_second']} tokens/s, {share}"
    size = line.get("piece_mib") or line.get("block_mib")
    memory = {True: ", page-locked", False: ", pageable", None: ""}[line.get("pinned")]
    return f"{line['bench']} {line['case']}, {size:g} MiB{memory}: {line['gbps']} GB/s"


def _plain(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))] if rows else []
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    text = [f"| {' | '.join(row)} |" for row in rows]
    return [*text[:1], "|" + "---|" * len(COLUMNS), *text[1:]] if rows else []


if __name__ == "__main__":
    sys.exit(main())
