"""The panel of a run on a terminal: what is on it, and how it is laid out. No thread, no clock, no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from slideformer.train.metrics import Metrics

WIDTH = 80  # no wider, however wide the terminal is: eyes do not travel so far
CURVE = 32  # log lines that the curve of the loss shows
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
LABEL, FIGURE, QUIET = "dim", "bold", "dim"
LANES = ("compute", "upload", "download", "update", "disk")


@dataclass(slots=True)
class View:
    """What is known of a run. tiers: bytes. began_s: on the clock that `panel` is given."""

    num_steps: int
    tiers: Mapping[str, int]
    began_s: float
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    evaluated: dict[str, float | int | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def step(self, metrics: Metrics) -> None:
        self.metrics = dict(metrics)
        if metrics.get("loss") is not None:
            self.losses = [*self.losses[1 - CURVE :], float(metrics["loss"] or 0.0)]

    def evaluation(self, metrics: Metrics) -> None:
        self.evaluated = dict(metrics)


def panel(view: View, now_s: float, *, width: int = WIDTH, ascii_only: bool = False) -> Text:
    """At most `width` and 80 columns wide; six lines, seven once there is an evaluation."""
    width = min(width, WIDTH)
    lines = [Text("-" * width if ascii_only else "─" * width, style=QUIET), _progress(view, now_s, width, ascii_only)]
    if view.metrics:
        bars = ASCII_BARS if ascii_only else BARS
        lines += [_loss(view, bars), _speed(view.metrics)]
    if view.evaluated:
        lines.append(_evaluation(view.evaluated))
    lines.append(_memory(view))
    if view.metrics:
        lines.append(_lanes(view.metrics))
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return Text("\n").join(lines)


def _progress(view: View, now_s: float, width: int, ascii_only: bool) -> Text:
    done = int(view.metrics.get("global_step") or 0)
    left = view.metrics.get("eta_seconds")
    count = f" {done:,}/{view.num_steps:,} "
    times = f" {done / view.num_steps:4.0%}  {duration(now_s - view.began_s)}"
    times += f"  eta {duration(float(left))}" if left is not None else ""
    room = max(width - len("step") - len(count) - len(times), 4)
    filled = round(room * done / view.num_steps)
    full, empty = ("#", ".") if ascii_only else ("━", "━")
    return Text.assemble(
        ("step", LABEL), (count, FIGURE), (full * filled, "green"), (empty * (room - filled), QUIET), (times, "")
    )


def _loss(view: View, bars: str) -> Text:
    loss = view.metrics.get("loss")
    norm = view.metrics.get("grad_norm")
    text = _figures(
        ("loss", f"{loss:.4f}" if loss is not None else "not finite"),
        ("lr", f"{view.metrics['learning_rate']:.1e}"),
        ("norm", f"{norm:.3g}" if norm is not None else "-"),
    )
    skipped = view.metrics.get("nonfinite_steps")
    if skipped:
        text.append(f"   {skipped:,} not finite", style="yellow")
    return text.append("   ").append(curve(view.losses, bars), style="cyan")


def _speed(metrics: Metrics) -> Text:
    return _figures(
        ("speed", f"{metrics['tokens_per_second']:,.0f} tokens/s"),
        ("step", f"{metrics['step_time']:.3g} s"),
        ("epoch", f"{metrics['epoch']:.2f}"),
        ("tokens", _short(float(metrics["num_input_tokens_seen"] or 0))),
    )


def _evaluation(metrics: Metrics) -> Text:
    losses = [(name, f"{value:.4f}") for name, value in metrics.items() if name.endswith("loss") and value is not None]
    return _figures(*losses).append(f"   after step {metrics['global_step']:,}", style=QUIET)


def _memory(view: View) -> Text:
    figures = [(name.removeprefix("host_"), _nbytes(nbytes)) for name, nbytes in view.tiers.items()]
    for name, label in (("gpu_mem_peak_gib", "GPU peak"), ("host_mem_gib", "process")):
        found = view.metrics.get(name)
        if found is not None:
            figures.append((label, _nbytes(float(found) * 2**30)))
    return _figures(("memory", ""), *figures)


def _lanes(metrics: Metrics) -> Text:
    shares = [(lane, metrics.get(f"busy_{lane}_pct")) for lane in LANES]
    return _figures(("busy", ""), *((lane, f"{min(share, 100):.0f}%") for lane, share in shares if share is not None))


def _figures(*pairs: tuple[str, str]) -> Text:
    parts = []
    for label, figure in pairs:
        part = Text(label, style=LABEL)
        parts.append(part.append(" ").append(figure, style=FIGURE) if figure else part)
    return Text("  ").join(parts)


def curve(values: Sequence[float], bars: str = BARS) -> str:
    """One character a value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    steps = len(bars) - 1
    return "".join(bars[round(steps * (v - low) / (high - low)) if high > low else 0] for v in values)


def _nbytes(number: float) -> str:
    """38.5G, 1.9M: of 2^30 and 2^20 bytes."""
    return f"{number / 2**30:.1f}G" if number >= 2**29 else f"{number / 2**20:.1f}M"


def _short(number: float) -> str:
    """950, 12.3k, 4.56M, 7.89G."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """41s, 3m20s, 2h05m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
