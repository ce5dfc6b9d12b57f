"""timeline.json: what every lane did during one ordinary step of a run, as it was measured."""

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
