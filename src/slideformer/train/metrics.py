"""The run's numbers: one JSON object a line in metrics.jsonl, one vocabulary everywhere.

Names: global_step, epoch, loss, grad_norm, learning_rate, num_input_tokens_seen, num_target_tokens_seen,
tokens_per_second, step_time, tflops, mfu, eta_seconds, nonfinite_steps, host_mem_gib, pinned_gib, gpu_mem_peak_gib,
nvme_read_gbps, nvme_write_gbps, nvme_written_gb, busy_LANE_pct, eval_loss and eval_perplexity (eval_NAME_loss for named
evaluation sets).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from slideformer.train.lines import LinesFile

METRICS = "metrics.jsonl"
GENERATIONS = "generations.jsonl"
Metrics = Mapping[str, float | int | None]


class MetricsFile(LinesFile):
    """metrics.jsonl of a run; `lines_until` gives the lines to start with."""

    def write(self, metrics: Metrics) -> None:
        """Append one line. Numbers that are not finite become null: JSON has no word for them."""
        super().write({k: v if v is None or math.isfinite(v) else None for k, v in metrics.items()})


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
