"""The run's numbers: one JSON object a line in metrics.jsonl, one vocabulary everywhere.

Names: global_step, epoch, loss, grad_norm, learning_rate, num_input_tokens_seen, num_target_tokens_seen,
tokens_per_second, step_time, tflops, mfu, eta_seconds, nonfinite_steps, host_mem_gib, pinned_gib, gpu_mem_peak_gib,
busy_LANE_pct, eval_loss and eval_perplexity (eval_NAME_loss for named evaluation sets).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Self

from slideformer.model import files

METRICS = "metrics.jsonl"
Metrics = Mapping[str, float | int | None]


class MetricsFile:
    """metrics.jsonl of a run. Context manager; a line is in the file when `write` returns, on disk after `flush`.

    A disk that refuses a line costs that line and not the run. Nothing is buffered, so that leaving a run whose disk
    hangs writes nothing.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, kept: str = "") -> None:
        """kept: the lines to start with (see `lines_until`)."""
        self._path, self._warn, self._kept = path, warn, kept
        self._torn = self._told = False

    def __enter__(self) -> Self:
        files.replace_text(self._path, self._kept)
        self._file: FileIO = open(self._path, "ab", buffering=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, metrics: Metrics) -> None:
        """Append one line. Numbers that are not finite become null: JSON has no word for them."""
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in metrics.items()}
        line = ("\n" if self._torn else "") + json.dumps(finite) + "\n"
        try:
            files.Summing(self._file).write(line.encode())
            self._torn = False
        except OSError as error:
            self._torn = True
            self._tell(error)

    def flush(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._warn(f"{self._path} cannot be written ({error.strerror}): its lines are missing until there is room")


def lines_until(path: Path, step: int, *, evaluated: bool) -> str:
    """The lines of a run up to a step, torn ones left out. evaluated: with those of the evaluation after it."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            metrics = json.loads(line)
            number = int(metrics["global_step"])
        except (ValueError, KeyError, TypeError):
            continue
        if number < step or (number == step and (evaluated or "loss" in metrics)):
            kept.append(line + "\n")
    return "".join(kept)


def evaluation_metrics(name: str, loss_sum: float, num_target_tokens: int) -> dict[str, float]:
    """eval_loss and eval_perplexity per target token, with the set's name in them if it has one."""
    loss = loss_sum / num_target_tokens
    prefix = f"eval_{name}_" if name else "eval_"
    return {f"{prefix}loss": loss, f"{prefix}perplexity": math.exp(loss) if loss < 700 else math.inf}
