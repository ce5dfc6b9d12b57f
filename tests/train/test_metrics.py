"""metrics.jsonl and evaluation's figures."""

from __future__ import annotations

import json
import math

from slideformer.train.metrics import MetricsFile, evaluation_metrics


def test_lines_are_on_disk_at_once_and_what_is_not_finite_is_null(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("of an earlier run\n")
    with MetricsFile(path) as file:
        file.write({"global_step": 1, "loss": math.nan, "grad_norm": math.inf, "epoch": 0.5})
        assert json.loads(path.read_text()) == {"global_step": 1, "loss": None, "grad_norm": None, "epoch": 0.5}
        file.write({"global_step": 2, "loss": None})
    assert [json.loads(line)["global_step"] for line in path.read_text().splitlines()] == [1, 2]


def test_evaluation_is_per_target_token_and_named() -> None:
    assert evaluation_metrics("", 6.0, 3) == {"eval_loss": 2.0, "eval_perplexity": math.exp(2.0)}
    assert list(evaluation_metrics("held", 6.0, 3)) == ["eval_held_loss", "eval_held_perplexity"]
    assert evaluation_metrics("", 3000.0, 3)["eval_perplexity"] == math.inf
