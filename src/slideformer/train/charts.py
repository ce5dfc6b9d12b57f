"""Charts as SVG text: a curve over the steps of a run, and the lanes of one step. Nothing but arithmetic and strings.

Every curve carries its points as data-points (JSON, the values as they were logged) beside the path that draws them, so
that the page's script, or a test, can tell what is drawn. data-frame of a chart has its scale:
x0, x1, y0, y1 of the values, then left, right, top, bottom in pixels.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence

from slideformer.schedule import LaneName
from slideformer.train.timeline import StepTimeline

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 26
LANE_HEIGHT, LANE_LEFT, LANE_RIGHT = 24, 84, 52
MAX_DOTS = 60  # with more points than this a curve needs no dots

Point = tuple[float, float | None]


def chart(series: Mapping[str, Sequence[Point]], *, colors: Sequence[str], from_zero: bool = False) -> str:
    """Curves over steps. series: name -> (step, value); None leaves a gap. from_zero: the axis starts there."""
    points = {name: [p for p in values] for name, values in series.items()}
    steps = [x for values in points.values() for x, _ in values]
    found = [y for values in points.values() for _, y in values if y is not None]
    if not found:
        return '<p class="none">nothing was logged</p>'
    x0, x1 = min(steps), max(steps)
    low, high = (min(0.0, *found) if from_zero else min(found)), max(found)
    ticks = nice_ticks(low, high)
    y0, y1 = min(low, ticks[0]), max(high, ticks[-1])
    frame = (x0, x1 if x1 > x0 else x0 + 1, y0, y1 if y1 > y0 else y0 + 1, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    parts = [_axes(ticks, frame)]
    for (name, values), color in zip(points.items(), _cycle(colors), strict=False):
        parts.append(_curve(name, values, color, frame))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" data-frame="{html.escape(json.dumps(frame))}" role="img">'
        + "".join(parts)
        + "</svg>"
    )


def timeline_chart(timeline: StepTimeline, colors: Mapping[str, str]) -> str:
    """One row a lane, one rectangle a stretch of work, and the lane's busy share."""
    lanes = [lane for lane in LaneName if lane in timeline.lanes]
    height = LANE_HEIGHT * len(lanes) + BOTTOM
    span = WIDTH - LANE_LEFT - LANE_RIGHT
    parts = []
    for row, lane in enumerate(lanes):
        y = row * LANE_HEIGHT
        parts.append(_tick(LANE_LEFT - 8, y + 16, html.escape(lane), anchor="end"))
        for one in timeline.lanes[lane]:
            x = LANE_LEFT + span * one.start_s / timeline.length_s
            width = max(span * (one.end_s - one.start_s) / timeline.length_s, 0.3)
            label = f"{lane}: {one.kind}, {one.start_s:.4g} to {one.end_s:.4g} s"
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="{LANE_HEIGHT - 6}" '
                f'fill="{colors.get(one.kind, "#888")}"><title>{html.escape(label)}</title></rect>'
            )
        share = timeline.busy.get(lane, 0.0)
        parts.append(_tick(WIDTH - 4, y + 16, f"{share:.0%}", anchor="end"))
    base = LANE_HEIGHT * len(lanes)
    for tick in nice_ticks(0.0, timeline.length_s):
        if tick <= timeline.length_s:
            x = LANE_LEFT + span * tick / timeline.length_s
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{base}"/>')
            parts.append(_tick(x, base + 16, f"{tick:g} s"))
    return f'<svg class="lanes" viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers, about `count` of them, from at most `low` to at least `high`."""
    if not high > low:
        return [low, low + (abs(low) or 1.0)]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _axes(ticks: Sequence[float], frame: tuple[float, ...]) -> str:
    x0, x1, _, _, left, right, _, bottom = frame
    parts = []
    for tick in ticks:
        y = _y(tick, frame)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_tick(left - 6, y + 4, label(tick), anchor="end"))
    for tick in nice_ticks(x0, x1):
        if x0 <= tick <= x1 and tick == round(tick):
            x = _x(tick, frame)
            parts.append(_tick(x, bottom + 18, f"{tick:,.0f}"))
    return "".join(parts)


def _tick(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _curve(name: str, values: Sequence[Point], color: str, frame: tuple[float, ...]) -> str:
    path, pen_up = [], True
    for x, y in values:
        if y is None:
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{_x(x, frame):.2f} {_y(y, frame):.2f}")
        pen_up = False
    data = html.escape(json.dumps([[x, y] for x, y in values]))
    dots = ""
    if len(values) <= MAX_DOTS:
        dots = "".join(
            f'<circle cx="{_x(x, frame):.2f}" cy="{_y(y, frame):.2f}" r="2.2" fill="{color}"/>'
            for x, y in values
            if y is not None
        )
    return (
        f'<path class="curve" data-name="{html.escape(name)}" data-points="{data}" d="{" ".join(path)}" '
        f'stroke="{color}"/>{dots}'
    )


def _x(value: float, frame: tuple[float, ...]) -> float:
    x0, x1, _, _, left, right, _, _ = frame
    return left + (right - left) * (value - x0) / (x1 - x0)


def _y(value: float, frame: tuple[float, ...]) -> float:
    _, _, y0, y1, _, _, top, bottom = frame
    return bottom - (bottom - top) * (value - y0) / (y1 - y0)


def label(value: float) -> str:
    """A number on an axis: 12k, 1.5M, 0.001, 1e-05."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale * 10 or (abs(value) >= scale and scale > 1e3):
            return f"{value / scale:g}{unit}"
    return f"{value:.6g}"


def _cycle(colors: Sequence[str]) -> list[str]:
    return [*colors] * 8
