"""metrics.jsonl and evaluation's figures."""

from __future__ import annotations

import json
import math

from slideformer.train.metrics import MetricsFile, evaluation_metrics, lines_until


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


def test_a_run_that_goes_on_keeps_the_lines_up_to_its_step_as_they_are(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"global_step": 0, "eval_loss": 5.0}',
        '{"global_step": 1, "loss":  0.25}',
        '{"global_step": 2, "loss": null}',
        '{"global_step": 2, "eval_loss": 4.0}',
        '{"global_step": 3, "loss": 1.0}',
        '{"global_step": 4, "lo',
    ]
    path.write_text("\n".join(lines))
    assert lines_until(path, 2, evaluated=True).splitlines() == lines[:4]
    assert lines_until(path, 2, evaluated=False).splitlines() == lines[:3]
    assert lines_until(path, 9, evaluated=True).splitlines() == lines[:5]
    assert lines_until(tmp_path / "none", 2, evaluated=True) == ""
    with MetricsFile(path, kept=lines_until(path, 1, evaluated=True)) as file:
        file.write({"global_step": 2, "loss": 0.5})
    assert path.read_text().splitlines() == [*lines[:2], '{"global_step": 2, "loss": 0.5}']
