"""train --dry-run, --json in its ends, and evaluate."""

from __future__ import annotations

import json
import os
import signal

import pytest

from slideformer.train import loop
from train.toy import make_model, write_sums


def test_a_dry_run_reads_and_plans_and_writes_nothing(slideformer, yaml_for, tmp_path) -> None:
    config = yaml_for(max_steps=0, num_train_epochs=3, per_device_train_batch_size=5)
    before = sorted(tmp_path.rglob("*"))
    done = slideformer("train", "--dry-run", config)
    assert done.returncode == 0, done.stderr
    assert "rows.jsonl: 12 of 12 rows for training" in done.stdout
    assert "9 steps, 3 an epoch" in done.stdout
    assert "block slots" in done.stdout
    assert done.stdout.endswith("nothing was trained\n")
    found = json.loads(slideformer("train", "--dry-run", config, "--json").stdout)
    assert found["num_steps"] == 9
    assert found["data"][0]["rows_kept"] == 12
    assert found["plan"]["host_nbytes"] > 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("fields", "code", "expected"),
    [
        ({"dataset": "nowhere.jsonl"}, 2, "nowhere.jsonl"),
        ({"max_host_memory": "1MiB"}, 3, "this run needs"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": "1e-9"}, 2, "polynomial cannot be used with"),
        ({"output_dir": "rows.jsonl/out"}, 2, "output_dir rows.jsonl/out cannot be made: "),
        ({"metric_for_best_model": "bleu", "early_stopping_patience": 1, "val_size": 2}, 2, "eval_bleu, which no"),
    ],
)
def test_a_dry_run_ends_as_the_run_would(slideformer, yaml_for, tmp_path, fields, code, expected) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    done = slideformer("train", "--dry-run", "--json", yaml_for(**fields))
    assert done.returncode == code
    assert expected in json.loads(done.stdout)["error"]
    assert json.loads(done.stdout)["exit_code"] == code


def test_a_dry_run_finds_weights_that_do_not_fit(slideformer, yaml_for, tmp_path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not weights")
    done = slideformer("train", "--dry-run", yaml_for(model_name_or_path=model))
    assert "model.safetensors" in done.stderr
    assert done.returncode == 2


def test_json_is_one_object_with_how_it_ended(slideformer, yaml_for, tmp_path) -> None:
    done = slideformer("train", yaml_for(report_to="trackio"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["global_step"], found["output_dir"]) == ("finished", 2, "out")
    last = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert found["metrics"] == last
    assert "step 2/2: loss" in done.stderr


def test_json_of_a_run_that_was_stopped(slideformer, yaml_for, monkeypatch) -> None:
    finish = loop.Loop._finish

    def stopping_finish(self, step):
        finish(self, step)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Loop, "_finish", stopping_finish)
    done = slideformer("train", "--json", yaml_for(max_steps=9))
    assert done.returncode == 143
    found = json.loads(done.stdout)
    assert (found["status"], found["exit_code"]) == ("stopped", 143)
    assert found["error"] == done.stderr.strip().splitlines()[-1]


def test_evaluate_gives_what_training_gives_and_writes_nothing(slideformer, yaml_for, tmp_path, toy) -> None:
    write_sums(tmp_path / "held.jsonl", 5, seed=4)
    config = yaml_for(eval_dataset="held.jsonl", eval_on_start="true")
    assert slideformer("train", config).returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    first, last = [line for line in lines if "eval_loss" in line]
    before = sorted(tmp_path.rglob("*"))
    done = slideformer("evaluate", config, "--json", "output_dir=elsewhere")
    assert json.loads(done.stdout) == {"eval_loss": first["eval_loss"], "eval_perplexity": first["eval_perplexity"]}
    done = slideformer("evaluate", config, "model_name_or_path=out", "output_dir=elsewhere")
    assert done.stdout == f"eval_loss {last['eval_loss']:.4f}\neval_perplexity {last['eval_perplexity']:.4f}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_evaluate_takes_no_optimizer_state(slideformer, yaml_for, tmp_path) -> None:
    write_sums(tmp_path / "held.jsonl", 5, seed=4)
    planned = json.loads(slideformer("plan", yaml_for(), "--json").stdout)
    weights = 4 * planned["parameters"]  # fp32 on a CPU
    limit = (weights + planned["device_nbytes"] + planned["host_nbytes"]) // 2
    done = slideformer("evaluate", yaml_for(eval_dataset="held.jsonl"), f"max_host_memory={max(limit, 2**20)}")
    assert done.returncode == 0, done.stderr
    assert slideformer("train", yaml_for(), f"max_host_memory={max(limit, 2**20)}").returncode == 3


def test_evaluate_without_anything_to_evaluate_says_what_to_give(slideformer, yaml_for) -> None:
    done = slideformer("evaluate", yaml_for())
    assert (done.returncode, done.stderr) == (2, "error: there is nothing to evaluate: give eval_dataset or val_size\n")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": "cuda"}, "error: device is cuda, but torch sees no CUDA device here"),
        ({"output_dir": "taken"}, "error: output_dir taken cannot be made: "),
        ({"output_dir": "taken/out"}, "error: output_dir taken/out cannot be made: "),
        ({"output_dir": "before"}, "error: before has checkpoints of an earlier run, the newest checkpoint-1: "),
        ({"output_dir": "new/out"}, "error: the data file nowhere.jsonl does not exist"),
    ],
)
def test_what_needs_no_data_is_refused_before_they_are_read(
    slideformer, yaml_for, tmp_path, monkeypatch, fields, expected
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "taken").write_text("a file")
    assert slideformer("train", yaml_for(output_dir="before", max_steps=1, save_steps=1)).returncode == 0
    for dry in ([], ["--dry-run"]):
        done = slideformer("train", yaml_for(dataset="nowhere.jsonl", **fields), *dry)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(expected), done.stderr
    assert not (tmp_path / "new").exists()  # nor does it leave an empty folder


def test_more_accumulation_than_rows_is_told_once_by_train_and_by_preview(slideformer, yaml_for) -> None:
    config = yaml_for(gradient_accumulation_steps=16, max_steps=2)
    for command in ("train", "preview"):
        done = slideformer(command, config)
        assert (done.stdout + done.stderr).count(
            "warning: a step takes 16 sequences (1 x 16), and there are 12 in an"
        ) == 1
