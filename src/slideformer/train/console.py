"""What a person sees of a run: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from slideformer.memory import size
from slideformer.train.metrics import Metrics


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


def open_console(stream: TextIO) -> Console:
    """A live line if `stream` is a terminal, plain lines otherwise."""
    return LiveConsole(stream) if stream.isatty() else PlainConsole(stream)


class PlainConsole:
    """One line for each thing, with the step's numbers side by side."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

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
    """One line that is drawn anew at every step; everything else scrolls by above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = RichConsole(file=stream, highlight=False)
        # Drawn when there is something new, so no thread is needed.
        self._progress = Progress(
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.refresh()
        self._progress.stop()

    def note(self, line: str) -> None:
        self._console.print(Text(line))

    def warn(self, line: str) -> None:
        self._console.print(Text(f"warning: {line}", style="yellow"))

    def begin(self, num_steps: int, tiers: Mapping[str, int]) -> None:
        self.note("memory: " + "  ".join(f"{tier} {size(nbytes)}" for tier, nbytes in tiers.items()))

    def step(self, metrics: Metrics, num_steps: int) -> None:
        self._progress.update(
            self._task,
            total=num_steps,
            completed=float(metrics["global_step"] or 0),
            description=step_text(metrics),
            visible=True,
            refresh=True,
        )

    def evaluation(self, metrics: Metrics) -> None:
        self._console.print(Text(evaluation_text(metrics), style="bold"))


def step_text(metrics: Metrics) -> str:
    """Loss, learning rate, norm, speed and time left: about 60 characters, so that a bar fits beside in 80."""
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


def duration(seconds: float) -> str:
    """41s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
