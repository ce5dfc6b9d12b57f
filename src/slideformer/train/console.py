"""What a person sees of a run: a panel that stays in its place on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, Self, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from slideformer.memory import size
from slideformer.train.metrics import Metrics
from slideformer.train.panel import View, duration, panel
from slideformer.train.steady import Steady, steady

REFRESHES_PER_SECOND = 2  # the clock on the panel; drawing takes about a millisecond


class Console(Protocol):
    """Where the trainer tells what happens. Context manager."""

    def note(self, line: str) -> None:
        """Something to know: data read, memory, where the result lies."""

    def warn(self, line: str) -> None:
        """Something to look at."""

    def begin(self, num_steps: int, tiers: Mapping[str, int]) -> None:
        """The first step is next. tiers: bytes allocated on each."""

    def step(self, metrics: Metrics, num_steps: int) -> None:
        """A step's metrics, each time some are logged."""

    def evaluation(self, metrics: Metrics) -> None:
        """An evaluation's metrics."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def open_console(stream: TextIO | Steady) -> Console:
    """The panel if `stream` is a terminal that can move its cursor, plain lines otherwise. Either outlives it."""
    stream = steady(stream)
    if not stream.isatty():
        return PlainConsole(stream)
    terminal = RichConsole(file=stream, highlight=False)
    return PlainConsole(stream) if terminal.is_dumb_terminal else LiveConsole(terminal)


class PlainConsole:
    """One line for each thing, with the step's numbers side by side."""

    def __init__(self, stream: TextIO | Steady) -> None:
        self._stream = steady(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def warn(self, line: str) -> None:
        self.note(f"warning: {line}")

    def begin(self, num_steps: int, tiers: Mapping[str, int]) -> None:
        self.note("memory: " + "  ".join(f"{tier} {size(nbytes)}" for tier, nbytes in tiers.items()))

    def step(self, metrics: Metrics, num_steps: int) -> None:
        self.note(f"step {metrics['global_step']}/{num_steps}: {step_text(metrics)}")

    def evaluation(self, metrics: Metrics) -> None:
        self.note(evaluation_text(metrics))


class LiveConsole:
    """The panel at the foot of the terminal; everything else scrolls by above it. rich redraws it in its own thread."""

    def __init__(self, terminal: RichConsole, *, now: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._now = terminal, now
        self._view: View | None = None
        self._live = Live(
            console=terminal, get_renderable=self._drawn, refresh_per_second=REFRESHES_PER_SECOND, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def _drawn(self) -> Text:
        if self._view is None:
            return Text("")
        options = self._terminal.options
        return panel(self._view, self._now(), width=options.max_width, ascii_only=options.ascii_only)

    def note(self, line: str) -> None:
        self._terminal.print(Text(line))

    def warn(self, line: str) -> None:
        self._terminal.print(Text(f"warning: {line}", style="yellow"))

    def begin(self, num_steps: int, tiers: Mapping[str, int]) -> None:
        self._view = View(num_steps, dict(tiers), self._now())
        self._live.refresh()

    def step(self, metrics: Metrics, num_steps: int) -> None:
        if self._view is not None:
            self._view.step(metrics)
            self._live.refresh()

    def evaluation(self, metrics: Metrics) -> None:
        self._terminal.print(Text(evaluation_text(metrics), style="bold"))
        if self._view is not None:
            self._view.evaluation(metrics)


def step_text(metrics: Metrics) -> str:
    """Loss, learning rate, norm, speed and time left."""
    loss, norm = metrics["loss"], metrics.get("grad_norm")
    parts = [
        f"loss {loss:.4f}" if loss is not None else "loss not finite",
        f"lr {metrics['learning_rate']:.1e}",
        f"norm {norm:.2f}" if norm is not None else "",
        f"{metrics['tokens_per_second']:,.0f} tok/s",
        f"eta {duration(metrics['eta_seconds'] or 0)}",
    ]
    return " ".join(part for part in parts if part)


def evaluation_text(metrics: Metrics) -> str:
    losses = [f"{k} {v:.4f}" for k, v in metrics.items() if k.endswith("loss") and v is not None]
    return f"evaluation after step {metrics['global_step']}: " + "  ".join(losses)
