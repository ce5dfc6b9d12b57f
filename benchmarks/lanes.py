"""What the lanes of a measured step say: seconds of forward, backward and update, and bytes through the host's memory.

Of `Timeline`s whose spans are measured. Sizes come from the layout, as in the plan's own bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slideformer.engine.costs import UPDATE_NBYTES
from slideformer.layout import Layout
from slideformer.schedule import Op, OpKind, Timeline
from slideformer.schedule.ops import DISK_LANES, LaneName
from slideformer.schedule.simulate import Span

FORWARD = frozenset({OpKind.EMBED, OpKind.PICK_ROWS, OpKind.FORWARD, OpKind.FORWARD_KEEP, OpKind.HEAD, OpKind.HEAD_SEE})
"""The head with its gradients among them, as in the stock model's forward with a fused loss."""

UPDATES = frozenset({OpKind.UPDATE, OpKind.UPDATE_TABLE, OpKind.UPDATE_REST, OpKind.UPDATE_ROWS})
"""What moves all of a parameter's state once; what is done ahead of the verdict, and may be done again, is not."""

AHEAD_NBYTES = {OpKind.UPDATE_AHEAD: UPDATE_NBYTES, OpKind.SETTLE: 16, OpKind.COMPLETE: 24}
"""Memory traffic a parameter with a bf16 gradient, where the op does something: the first in unclipped steps."""

GATHERED = 2
"""A gathered byte is read and written."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a step. itemsize: bytes of an element that crosses the link; num_rows: of the table that the batch touches;
    hidden_nbytes: of a micro-batch's hidden state."""

    layout: Layout
    itemsize: int
    num_rows: int
    hidden_nbytes: int

    @property
    def rows_nbytes(self) -> int:
        return self.num_rows * self.layout.units[0].row_numel * self.itemsize

    @property
    def touched(self) -> float:
        """Share of the table's rows: of every tile, since rows lie anywhere."""
        return self.num_rows / self.layout.units[0].params[0].shape[0]

    def copied_nbytes(self, op: Op) -> int:
        """Bytes that an op moves over the link; words of a few bytes (norms, the loss) are left out, and what GPUDirect
        Storage moves past the host (emulated, it crosses the link all the same)."""
        if op.lane in DISK_LANES:
            return 0
        match op.kind:
            case OpKind.UPLOAD:
                return self.layout.tiles(op.unit)[op.tile].numel * self.itemsize
            case OpKind.DOWNLOAD:
                return self.layout.tiles(op.unit, trained=True)[op.tile].numel * self.itemsize
            case OpKind.UPLOAD_ROWS | OpKind.DOWNLOAD_ROWS:
                return self.rows_nbytes
            case OpKind.SPILL | OpKind.FETCH:
                return self.hidden_nbytes
        return 0

    def updated_numel(self, op: Op) -> float:
        """Parameters whose state an update moves."""
        if op.kind not in UPDATES:
            return 0.0
        numel = self.layout.tiles(op.unit, trained=True)[op.tile].numel
        shares = {OpKind.UPDATE_REST: 1.0 - self.touched, OpKind.UPDATE_ROWS: self.touched}
        return numel * shares.get(op.kind, 1.0)

    def gathered_nbytes(self, op: Op) -> float:
        if op.kind is not OpKind.GATHER:
            return 0.0
        return GATHERED * self.touched * self.layout.tiles(op.unit)[op.tile].numel * self.itemsize


def parts_s(timelines: Sequence[Timeline], sizes: Sizes) -> dict[str, float | None]:
    """Median seconds of a step's forward and backward in the compute lane, and what the update of every parameter that
    is trained on the host takes at the rate of the update lane (None where nothing is)."""
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for timeline in timelines:
        compute = [s for s in timeline.spans if s.op.lane is LaneName.COMPUTE]
        forward = sum(s.end_s - s.start_s for s in compute if s.op.kind in FORWARD)
        found["forward"].append(forward)
        found["backward"].append(sum(s.end_s - s.start_s for s in compute) - forward)
    parts: dict[str, float | None] = {name: _short(statistics.median(times)) for name, times in found.items()}
    updates = [(s, sizes.updated_numel(s.op)) for t in timelines for s in t.spans if s.op.kind in UPDATES]
    ahead = [found for t in timelines for found in _ahead(t, sizes)]
    updates = max(updates, ahead, key=_numel)  # a norm's vector alone may be left to update in place
    numel = _numel(updates)
    all_numel = sum(unit.train_numel for unit in sizes.layout.units)
    took = sum(s.end_s - s.start_s for s, _ in updates)
    parts["update"] = _short(took * all_numel / numel) if numel else None
    return parts


def _numel(updates: Sequence[tuple[Span, float]]) -> float:
    return sum(numel for _, numel in updates)


def _ahead(timeline: Timeline, sizes: Sizes) -> Iterator[tuple[Span, float]]:
    """Of a step that updates everything ahead: what it did, and how many updates in place move as many bytes. Nothing
    says whether it was clipped but where its time went."""
    took = dict.fromkeys(AHEAD_NBYTES, 0.0)
    for span in timeline.spans:
        if span.op.kind in took:
            took[span.op.kind] += span.end_s - span.start_s
    clipped = took[OpKind.SETTLE] > took[OpKind.UPDATE_AHEAD]
    for span in timeline.spans:
        if span.op.kind in took and clipped == (span.op.kind is not OpKind.UPDATE_AHEAD):
            numel = sizes.layout.tiles(span.op.unit, trained=True)[span.op.tile].numel
            yield span, numel * AHEAD_NBYTES[span.op.kind] / UPDATE_NBYTES


def dram_gbps(timelines: Sequence[Timeline], sizes: Sizes) -> float | None:
    """GB/s that update and copies move through the host's memory while the update lane works; None if it never does.

    timelines: of steps that follow each other; updates of the last one count only where it is alone, since the copies
    of the step behind it are not there. The update of a parameter moves 26 bytes. A copy over the link moves each byte
    once, in as far as it lies beside an update; a gather twice.
    """
    counted = [s for t in timelines[: max(len(timelines) - 1, 1)] for s in t.spans if s.op.kind in UPDATES]
    updates = [(s.start_s, s.end_s) for s in counted]
    took = sum(end - start for start, end in updates)
    nbytes = sum(UPDATE_NBYTES * sizes.updated_numel(s.op) for s in counted)
    for span in (s for t in timelines for s in t.spans):
        moved = sizes.copied_nbytes(span.op) + sizes.gathered_nbytes(span.op)
        if moved and span.end_s > span.start_s:
            nbytes += moved * _overlap_s(span.start_s, span.end_s, updates) / (span.end_s - span.start_s)
    return round(nbytes / took / 1e9, 2) if took else None


def _overlap_s(start: float, end: float, others: Sequence[tuple[float, float]]) -> float:
    """Of one interval with others, which do not overlap each other: they are of one lane."""
    return sum(max(min(end, e) - max(start, s), 0.0) for s, e in others)


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")
