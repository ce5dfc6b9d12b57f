"""The run's numbers: one JSON object a line in metrics.jsonl, one vocabulary everywhere.

Names: global_step, epoch, loss, grad_norm, learning_rate, num_input_tokens_seen, num_target_tokens_seen,
tokens_per_second, step_time, tflops, mfu, eta_seconds, nonfinite_steps, host_mem_gib, pinned_gib, gpu_mem_peak_gib,
busy_LANE_pct, eval_loss and eval_perplexity (eval_NAME_loss for named evaluation sets).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self, TextIO

METRICS = "metrics.jsonl"
Metrics = Mapping[str, float | int | None]


class MetricsFile:
    """metrics.jsonl of a run. Context manager; a line is in the file when `write` returns, on disk after `flush`."""

    def __init__(self, path: Path, *, kept: str = "") -> None:
        """kept: the lines to start with (see `lines_until`)."""
        self._path, self._kept = path, kept

    def __enter__(self) -> Self:
        partial = self._path.with_name(f".{self._path.name}")
        partial.write_text(self._kept, encoding="utf-8")
        partial.replace(self._path)
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, metrics: Metrics) -> None:
        """Append one line. Numbers that are not finite become null: JSON has no word for them."""
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


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
