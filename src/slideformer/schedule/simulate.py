"""Runs a plan on a virtual clock: when each op would start and end, what each lane carries, and the picture of it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from slideformer.schedule.clock import clocked
from slideformer.schedule.ops import DISK_LANES, LaneName, Op, OpKind, Plan

LETTERS = {
    OpKind.FORWARD: "F",
    OpKind.FORWARD_KEEP: "F",
    OpKind.BACKWARD: "B",
    OpKind.BACKWARD_KEPT: "B",
    OpKind.HEAD: "H",
    OpKind.HEAD_LOSS: "H",
    OpKind.HEAD_SEE: "H",
    OpKind.HEAD_GRADS: "H",
    OpKind.EMBED: "E",
    OpKind.EMBED_BACKWARD: "E",
    OpKind.UPLOAD: "u",
    OpKind.UPLOAD_ROWS: "r",
    OpKind.PICK_ROWS: "r",
    OpKind.DOWNLOAD: "d",
    OpKind.DOWNLOAD_ROWS: "r",
    OpKind.UPDATE: "U",
    OpKind.UPDATE_RESIDENT: "U",
    OpKind.UPDATE_RESIDENT_TABLE: "R",
    OpKind.UPDATE_TABLE: "R",
    OpKind.UPDATE_REST: "R",
    OpKind.UPDATE_ROWS: "R",
    OpKind.UPDATE_AHEAD: "A",
    OpKind.REST_AHEAD: "A",
    OpKind.SETTLE_ROWS: "R",
    OpKind.SETTLE_OTHERS: "R",
    OpKind.SETTLE: "W",
    OpKind.COMPLETE: "C",
    OpKind.COMPLETE_ROWS: "C",
    OpKind.SPILL: "s",
    OpKind.FETCH: "f",
    OpKind.GATHER: "g",
    **dict.fromkeys((OpKind.READ_STATE, OpKind.READ_ROWS, OpKind.READ_WEIGHTS, OpKind.READ_SAVED), "i"),
    **dict.fromkeys((OpKind.WRITE_STATE, OpKind.WRITE_ROWS, OpKind.WRITE_SAVED), "o"),
    OpKind.FORWARD_CACHED: "F",
    OpKind.EMBED_CACHED: "E",
    OpKind.HEAD_LAST: "H",
    OpKind.HEAD_LOGITS: "H",
    OpKind.HEAD_PICK: "H",
    OpKind.SPILL_CACHE: "s",
    OpKind.FETCH_CACHE: "f",
    OpKind.NEXT: "g",
}
OTHER = "-"
LEGEND = {
    "F": "forward",
    "B": "backward",
    "H": "head",
    "E": "embedding",
    "u": "upload",
    "d": "download",
    "r": "rows",
    "U": "update",
    "R": "table-update",
    "A": "update-ahead",
    "W": "new-weights",
    "C": "completion",
    "s": "spill",
    "f": "fetch",
    "g": "gather",
    "i": "read",
    "o": "written",
    OTHER: "other",
}


def three_digits(value: float) -> str:
    """For people: 0.00479, 12.3, 1,966."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


class Span(NamedTuple):
    """One op on the clock. run: which of the joined runs. Times in seconds from the start of the first run."""

    op: Op
    run: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one or several joined runs, in program order."""

    spans: tuple[Span, ...]

    @property
    def end_s(self) -> float:
        return max(s.end_s for s in self.spans)

    def step_s(self) -> float:
        """Distance of the last two runs' ends on the compute lane: the step time once runs join."""
        ends: dict[int, float] = {}
        for span in self.spans:
            if span.op.lane is LaneName.COMPUTE:
                ends[span.run] = max(span.end_s, ends.get(span.run, 0.0))
        runs = sorted(ends)
        return ends[runs[-1]] - (ends[runs[-2]] if len(runs) > 1 else 0.0)

    def worked_s(self) -> dict[str, float]:
        """Seconds in which each lane worked, by name. Those between disk and host are one, "disk": while any works."""
        total: dict[str, float] = {}
        disk: list[tuple[float, float]] = []
        for span in self.spans:
            if span.op.lane in DISK_LANES:
                disk.append((span.start_s, span.end_s))
            else:
                lane = str(span.op.lane)
                total[lane] = total.get(lane, 0.0) + span.end_s - span.start_s
        end = 0.0
        for start_s, end_s in sorted(disk):
            total["disk"] = total.get("disk", 0.0) + max(end_s - max(start_s, end), 0.0)
            end = max(end, end_s)
        return total

    def busy(self) -> dict[LaneName, float]:
        """Share of the time from first start to last end during which each lane works."""
        total = {lane: 0.0 for lane in LaneName}
        for span in self.spans:
            total[span.op.lane] += span.end_s - span.start_s
        length = self.end_s - min(s.start_s for s in self.spans)
        return {lane: used / length if length else 0.0 for lane, used in total.items()}

    def text(self, *, width: int = 100, run: int | None = None) -> str:
        """A picture: one line a lane, one letter per slice of time, '.' where the lane is idle, and its busy share.

        run: only from this run's first op in the compute lane to the next run's, with whatever runs then.
        """
        begin, end = self._period(run)
        slice_s = (end - begin) / width or 1.0
        rows, seen = [], set()
        for lane in LaneName:
            columns = self._columns(lane, begin, slice_s, width)
            share = sum(sum(c.values()) for c in columns) / (slice_s * width)
            if share > 0:
                row = "".join(_letter(c, slice_s) for c in columns)
                seen.update(row)
                rows.append((lane, f"{row} {share:4.0%}"))
        ruler = f"0 s{f'{three_digits(end - begin)} s':>{width - 3}}"
        legend = textwrap.wrap(" ".join(f"{k}={v}" for k, v in LEGEND.items() if k in seen), width)
        rows += [("", line) for line in (ruler, *legend)]
        names = max(9, *(len(name) for name, _ in rows))
        return "\n".join(f"{name:>{names}} {row}" for name, row in rows)

    def _period(self, run: int | None) -> tuple[float, float]:
        if run is None:
            return min(s.start_s for s in self.spans), self.end_s
        starts = [s for s in self.spans if s.op.lane is LaneName.COMPUTE]
        begin = min(s.start_s for s in starts if s.run == run)
        return begin, min((s.start_s for s in starts if s.run == run + 1), default=self.end_s)

    def _columns(self, lane: LaneName, begin: float, slice_s: float, width: int) -> list[dict[str, float]]:
        """Per slice of time: how long this lane works for each letter."""
        columns: list[dict[str, float]] = [{} for _ in range(width)]
        for span in (s for s in self.spans if s.op.lane is lane):
            letter = LETTERS.get(span.op.kind, OTHER)
            first = max(int((span.start_s - begin) / slice_s), 0)
            last = min(int((span.end_s - begin) / slice_s), width - 1)
            for column in range(first, last + 1):
                left, right = begin + column * slice_s, begin + (column + 1) * slice_s
                overlap = min(span.end_s, right) - max(span.start_s, left)
                if overlap > 0:
                    columns[column][letter] = columns[column].get(letter, 0.0) + overlap
        return columns

    def chrome_trace(self) -> str:
        """JSON for chrome://tracing or Perfetto: one thread a lane, microseconds."""
        lanes = {lane: i for i, lane in enumerate(LaneName)}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": str(lane)}}
            for lane, i in lanes.items()
        ]
        events += [
            {
                "name": str(s.op),
                "ph": "X",
                "pid": 0,
                "tid": lanes[s.op.lane],
                "ts": round(s.start_s * 1e6, 3),
                "dur": round((s.end_s - s.start_s) * 1e6, 3),
                "args": {"run": s.run, "touches": [str(a.buffer) for a in s.op.accesses][:32]},
            }
            for s in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _letter(column: dict[str, float], slice_s: float) -> str:
    """What fills most of a slice; a tenth of it is enough to be seen."""
    return max(column, key=column.__getitem__) if sum(column.values()) > 0.1 * slice_s else "."


def simulate(plan: Plan, cost_s: Callable[[Op], float], *, runs: int = 1) -> Timeline:
    """The timeline of `runs` joined runs when op i takes cost_s(op) seconds. Lanes are FIFO, waits as in the plan. The
    disk's lanes share it: while two of them work, each takes twice as long."""
    spans: list[Span] = []
    for run, (starts, ends) in enumerate(clocked(plan, [cost_s(op) for op in plan.ops], runs)):
        spans += [Span(op, run, start, end) for op, start, end in zip(plan.ops, starts, ends, strict=True)]
    return Timeline(tuple(spans))


def joined_step_s(plan: Plan, cost_s: Callable[[Op], float], *, runs: int = 3) -> float:
    """`simulate(...).step_s()` in a fraction of its time: for whoever compares plans and draws none."""
    compute = [i for i, op in enumerate(plan.ops) if op.lane is LaneName.COMPUTE]
    last = [max(ends[i] for i in compute) for _, ends in clocked(plan, [cost_s(op) for op in plan.ops], runs)]
    return last[-1] - (last[-2] if runs > 1 else 0.0)
