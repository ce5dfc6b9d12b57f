"""What every lane did during ordinary steps of a run, as it was measured: timeline.json of one step, for the report;
trace.json for a trace viewer and trace.txt for people, of several joined steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from slideformer.model import files
from slideformer.schedule import Timeline
from slideformer.schedule.simulate import LEGEND, LETTERS, OTHER, Span

log = logging.getLogger(__name__)
FILE = "timeline.json"
AFTER_STEPS = 3  # the first ones of a process warm up allocators and caches
TRACE, TRACE_TEXT = "trace.json", "trace.txt"
TRACED_STEPS = 3  # the second has one before and one after it, as most steps have
TRACE_WIDTH = 150
SLICES = 2000  # work of one kind that follows within such a part of the step is one stretch: no screen shows more


class Stretch(BaseModel):
    """Work of one kind in a lane. Seconds from the step's start."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    start_s: float
    end_s: float


class StepTimeline(BaseModel):
    """step: its number, from 1. length_s: from the first start to the last end. busy: share of it, per lane."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    length_s: float
    busy: dict[str, float]
    lanes: dict[str, tuple[Stretch, ...]]


def write_timeline(folder: Path, step: int, timeline: Timeline) -> None:
    """Write it into a run's folder, in one go. A disk that refuses is told of in the log."""
    begin = min(span.start_s for span in timeline.spans)
    length = timeline.end_s - begin
    lanes: dict[str, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        lanes.setdefault(str(span.op.lane), []).append(span)
    found = StepTimeline(
        step=step,
        length_s=length,
        busy={str(lane): share for lane, share in timeline.busy().items() if share > 0},
        lanes={lane: tuple(_stretches(spans, begin, length / SLICES)) for lane, spans in lanes.items()},
    )
    try:
        files.replace_text(folder / FILE, found.model_dump_json())
    except OSError as error:
        log.warning("%s cannot be written: %s", folder / FILE, error.strerror)


class Tracer:
    """Collects some steps and writes their trace into a run's folder."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        """first, last: steps, from 1, both included."""
        self._folder, self._first, self._last = folder, first, last
        self._spans: list[Span] = []

    def wants(self, step: int) -> bool:
        return self._first <= step <= self._last

    def add(self, step: int, timeline: Timeline) -> None:
        """Steps in their order. A disk that refuses is told of in the log."""
        self._spans += (span._replace(run=step - self._first) for span in timeline.spans)
        if step != self._last:
            return
        begin = min(span.start_s for span in self._spans)
        moved = (s._replace(start_s=s.start_s - begin, end_s=s.end_s - begin) for s in self._spans)
        whole, num = Timeline(tuple(moved)), step - self._first + 1
        shown = (num - 1) // 2
        text = f"step {self._first + shown}, and what runs beside it\n\n{whole.text(width=TRACE_WIDTH, run=shown)}\n"
        for name, content in ((TRACE, whole.chrome_trace()), (TRACE_TEXT, text)):
            try:
                files.replace_text(self._folder / name, content)
            except OSError as error:
                log.warning("%s cannot be written: %s", self._folder / name, error.strerror)
        self._spans = []


def read_timeline(folder: Path) -> StepTimeline | None:
    """None where there is none that can be read."""
    try:
        return StepTimeline.model_validate(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def _stretches(spans: Sequence[Span], begin: float, slice_s: float) -> list[Stretch]:
    found: list[Stretch] = []
    for span in spans:
        kind = LEGEND[LETTERS.get(span.op.kind, OTHER)]
        start, end = span.start_s - begin, span.end_s - begin
        if end - start <= 0:
            continue
        last = found[-1] if found else None
        if last is not None and last.kind == kind and start - last.end_s < slice_s:
            found[-1] = Stretch(kind=kind, start_s=last.start_s, end_s=max(end, last.end_s))
        else:
            found.append(Stretch(kind=kind, start_s=start, end_s=end))
    return found
