"""loss.png: the losses of a run over its steps, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from slideformer.train.metrics import METRICS

FILE = "loss.png"


def plot_loss(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Draw metrics.jsonl of a run beside it. None where matplotlib is missing, or fails: then it is warned of."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    try:
        return _draw(folder)
    except Exception as error:  # a picture is not worth a run
        warn(f"{folder / FILE} could not be drawn: {error}")
        return None


def _draw(folder: Path) -> Path:
    from matplotlib.figure import Figure  # not pyplot, which keeps a state of the process and may want a screen

    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = sorted({name for line in lines for name in line if name == "loss" or name.endswith("_loss")}, key=len)
    for name in names:
        points = [(line["global_step"], line[name]) for line in lines if line.get(name) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, label=name, marker="" if name == "loss" else "o", linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy per target token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / FILE, dpi=120)
    return folder / FILE
