"""Whole runs on a toy model through the real engine: what is logged, evaluated, saved, and how a run ends."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slideformer.data import Batches, load_dataset, load_tokenizer
from slideformer.data.batches import StepBatch
from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.train import trainer
from slideformer.train.console import PlainConsole
from slideformer.train.interval import Interval
from slideformer.train.schedule import learning_rate
from slideformer.train.stop import Stopped
from slideformer.train.trainer import train
from train.toy import make_model, write_sums


def run(config) -> list[dict]:
    """The lines of metrics.jsonl after training."""
    train(config, PlainConsole(io.StringIO()))
    return read_metrics(config)


def read_metrics(config) -> list[dict]:
    with open(f"{config.output_dir}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def plain_torch(config) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of the same run in transformers and torch.optim."""
    codec = load_tokenizer(config.model_name_or_path)
    sources = load_dataset(config, codec).train
    batches = Batches(
        sources,
        config.per_device_train_batch_size,
        config.gradient_accumulation_steps,
        config.data_seed,
        codec.pad_id,
    )
    num_steps = batches.num_steps(epochs=config.num_train_epochs, max_steps=config.max_steps)
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32)
    decaying = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decaying, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    losses, norms = [], []
    for index in range(num_steps):
        batch = batches.step(index)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, index, num_steps)
        total = 0.0
        for micro in batch.micro_batches:
            logits = model(micro.input_ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), micro.labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / batch.num_target_tokens).backward()
            total += float(loss.detach()) / batch.num_target_tokens
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_run_equals_plain_torch_on_the_same_rows(config_for, max_grad_norm) -> None:
    config = config_for(
        gradient_accumulation_steps=2,
        num_train_epochs=2.5,
        max_grad_norm=max_grad_norm,
        weight_decay=1.0,
        per_device_train_batch_size=5,
    )
    metrics = run(config)
    losses, norms, weights = plain_torch(config)
    assert len(metrics) == len(losses) == 8
    # fp32, sums in another order: each step's relative error is some 1e-6, and eight steps let it grow.
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-4)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-3)
    saved = AutoModelForCausalLM.from_pretrained(config.output_dir).state_dict()
    for name, weight in weights.items():
        # Adam divides tiny gradients by their own size, so an element may differ by a part of one update (1e-3).
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-4, msg=name)


def test_metrics_count_tokens_epochs_and_rates(config_for) -> None:
    config = config_for(gradient_accumulation_steps=2, warmup_steps=1, num_train_epochs=2)
    metrics = run(config)
    assert [m["global_step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["epoch"] for m in metrics] == [0.3333, 0.6667, 1.0, 1.3333, 1.6667, 2.0]
    assert [m["learning_rate"] for m in metrics] == [learning_rate(config, k, 6) for k in range(6)]
    report = json.loads((Path(config.output_dir) / "run.json").read_text())["data"][0]
    assert metrics[-1]["num_input_tokens_seen"] == 2 * report["tokens"]
    assert metrics[-1]["num_target_tokens_seen"] == 2 * report["supervised_tokens"]
    for m in metrics:
        assert m["tokens_per_second"] > 0
        assert m["step_time"] > 0
        assert 0 < m["host_mem_gib"] < 16
        assert m["nonfinite_steps"] == 0
        # 4 blocks of hidden 64: queries and outputs, keys and values of half the heads, a gated MLP of 128; tied head
        weights = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 259 * 64
        assert m["tflops"] == pytest.approx(6 * weights * m["tokens_per_second"] / 1e12)
        assert {"busy_compute_pct", "busy_upload_pct", "busy_download_pct", "busy_update_pct"} <= m.keys()
    assert metrics[-1]["eta_seconds"] == 0


def test_logging_steps_log_the_mean_loss_per_target_token_of_their_steps(config_for) -> None:
    every = run(config_for(max_steps=5))
    some = run(config_for(max_steps=5, logging_steps=2))
    assert [m["global_step"] for m in some] == [2, 4, 5]
    seen = [0, *(m["num_target_tokens_seen"] for m in every)]
    sums = [m["loss"] * (seen[i + 1] - seen[i]) for i, m in enumerate(every)]
    expected = [(sums[0] + sums[1]) / (seen[2] - seen[0]), (sums[2] + sums[3]) / (seen[4] - seen[2]), every[4]["loss"]]
    assert [m["loss"] for m in some] == pytest.approx(expected, rel=1e-12)


def test_time_between_steps_that_is_not_training_does_not_count(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    batch = StepBatch((), (), 0.5, num_input_tokens=100, num_target_tokens=10)
    interval = Interval()
    now[0] = 4.0
    interval.add(1.0, batch)
    now[0] = 50.0  # an evaluation
    interval.restart()
    now[0] = 52.0
    interval.add(3.0, batch)
    speed = interval.close()
    assert (speed.loss, speed.step_s, speed.tokens_per_second) == (2.0, 3.0, 200 / 6)
    assert interval.mean_step_s() == 3.0


def test_the_next_step_is_submitted_before_the_last_ones_result_is_read(config_for, monkeypatch) -> None:
    order = []
    submit, finish = trainer.Loop._submit, trainer.Loop._finish

    def noting_submit(self, index, waiting):
        order.append(f"submit {index + 1}")
        return submit(self, index, waiting)

    def noting_finish(self, step):
        order.append(f"read {step.number}")
        return finish(self, step)

    monkeypatch.setattr(trainer.Loop, "_submit", noting_submit)
    monkeypatch.setattr(trainer.Loop, "_finish", noting_finish)
    run(config_for(max_steps=3))
    assert order == ["submit 1", "submit 2", "read 1", "submit 3", "read 2", "read 3"]


def test_evaluation_is_token_weighted_and_independent_of_its_batch_size(config_for, tmp_path) -> None:
    held = {
        "a": str(write_sums(tmp_path / "a.jsonl", 7, seed=1)),
        "b": str(write_sums(tmp_path / "b.jsonl", 3, seed=2)),
    }
    by_size = {}
    for size in (1, 2, 3):
        sizes = {"max_length": 32, "per_device_train_batch_size": 2, "per_device_eval_batch_size": size}
        metrics = run(config_for(max_steps=1, eval_dataset=held, eval_on_start=True, **sizes))
        assert [m["global_step"] for m in metrics if "eval_a_loss" in m] == [0, 1]
        by_size[size] = [metrics[0]["eval_a_loss"], metrics[0]["eval_b_loss"]]
    assert by_size[2] == pytest.approx(by_size[1], rel=1e-6)
    assert by_size[3] == pytest.approx(by_size[1], rel=1e-6)
    config = config_for()
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path)
    codec = load_tokenizer(config.model_name_or_path)
    samples = load_dataset(config_for(eval_dataset=held), codec).evaluation["a"]
    loss_sum = sum(
        float(
            torch.nn.functional.cross_entropy(
                model(s.input_ids[None].long()).logits[0, :-1].detach(), s.labels[1:].long(), reduction="sum"
            )
        )
        for s in samples
    )
    expected = loss_sum / sum(s.num_target_tokens for s in samples)
    assert by_size[1][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}, [2, 4, 5]),
        ({"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}, [2, 4]),
        ({"eval_strategy": "epoch", "num_train_epochs": 2}, [5, 10]),
        ({"eval_strategy": "no", "max_steps": 2}, []),
    ],
)
def test_evaluations_come_when_asked_and_at_the_end(config_for, fields, expected) -> None:
    metrics = run(config_for(val_size=4, **fields))
    assert [m["global_step"] for m in metrics if "eval_loss" in m] == expected


def test_evaluating_in_between_changes_nothing_of_the_training(config_for) -> None:
    without = run(config_for(val_size=4, eval_strategy="no", max_steps=4))
    with_it = run(config_for(val_size=4, eval_strategy="steps", eval_steps=1, max_steps=4))
    assert [m["loss"] for m in with_it if "loss" in m] == [m["loss"] for m in without]


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_the_result_is_a_folder_that_transformers_loads_in_the_asked_dtype(
    config_for, tmp_path, own, asked, expected
) -> None:
    config = config_for(model=make_model(tmp_path / "model", dtype=own), max_steps=1, save_dtype=asked)
    run(config)
    model, info = AutoModelForCausalLM.from_pretrained(config.output_dir, output_loading_info=True, dtype="auto")
    assert model.dtype == expected
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before = AutoTokenizer.from_pretrained(config.model_name_or_path)
    after = AutoTokenizer.from_pretrained(config.output_dir)
    talk = [{"role": "user", "content": "hi"}]
    assert after.apply_chat_template(talk, tokenize=False) == before.apply_chat_template(talk, tokenize=False)
    assert after("a  5")["input_ids"] == before("a  5")["input_ids"]
    assert model.generation_config.eos_token_id == [258, 257]


def test_run_json_has_the_resolved_config_versions_and_how_it_ended(config_for) -> None:
    config = config_for(max_steps=2, val_size=4)
    metrics = run(config)
    record = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert record["status"] == "finished"
    assert type(config).model_validate(record["config"]) == config
    assert record["versions"]["torch"] == torch.__version__
    assert record["last_metrics"]["loss"] == metrics[-2]["loss"]
    assert record["last_metrics"]["eval_loss"] == metrics[-1]["eval_loss"]
    assert record["num_steps"] == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_saves_nothing(config_for, monkeypatch, signum) -> None:
    finish = trainer.Loop._finish

    def stopping_finish(self, step):
        finish(self, step)
        if step.number == 2:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(trainer.Loop, "_finish", stopping_finish)
    config = config_for(max_steps=9)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped, match=f"stopped by {signum.name} after step 3 of 9: nothing was saved") as caught:
        run(config)
    assert caught.value.signum == signum
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert json.loads((Path(config.output_dir) / "run.json").read_text())["status"] == "stopped"
    assert not (Path(config.output_dir) / "model.safetensors").exists()


def test_a_signal_while_weights_are_read_comes_before_the_first_step(config_for, tmp_path, monkeypatch) -> None:
    write = trainer.Engine.write

    def signalled(self, *args) -> None:
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        write(self, *args)

    sent: list[None] = []
    monkeypatch.setattr(trainer.Engine, "write", signalled)
    with pytest.raises(Stopped, match="stopped by SIGTERM before the first step: nothing was saved"):
        run(config_for(max_steps=9, save_steps=2))
    assert not list(tmp_path.glob("out/*checkpoint*")) and not (tmp_path / "out/model.safetensors").exists()
    monkeypatch.setattr(trainer.Engine, "write", write)
    assert run(config_for(max_steps=2, save_steps=2, resume_from_checkpoint="auto"))[-1]["global_step"] == 2


def test_a_second_signal_ends_the_run_at_once(config_for, monkeypatch) -> None:
    def impatient_finish(self, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trainer.Loop, "_finish", impatient_finish)
    with pytest.raises(Stopped, match="at once, because it was the second signal"):
        run(config_for(max_steps=9))


def test_a_non_finite_loss_stops_the_run_with_step_and_rows(config_for, monkeypatch) -> None:
    config = config_for(max_steps=4, learning_rate=1e38, warmup_steps=0, max_grad_norm=0, lr_scheduler_type="constant")
    with pytest.raises(RunFailed) as caught:
        run(config)
    message = str(caught.value)
    assert re.match(r"step 2: .*; its rows: .*rows.jsonl:\d+", message), message
    assert message.endswith("Look at these rows, lower learning_rate, or set on_nonfinite: skip")
    record = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", message)


def test_steps_that_are_not_finite_can_be_skipped_and_are_counted(config_for) -> None:
    fields = {"learning_rate": 1e38, "warmup_steps": 0, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    every = run(config_for(max_steps=3, on_nonfinite="skip", **fields))
    assert [m["loss"] is None for m in every] == [False, True, True]
    assert [m["grad_norm"] is None for m in every] == [False, True, True]
    assert [m["nonfinite_steps"] for m in every] == [0, 1, 2]
    (both,) = run(config_for(max_steps=2, on_nonfinite="skip", logging_steps=2, **fields))
    assert both["loss"] == every[0]["loss"]


def test_rows_that_are_hardly_meant_so_are_warned_of(config_for, tmp_path) -> None:
    path = tmp_path / "empty_prompt.jsonl"
    path.write_text(json.dumps({"prompt": "", "completion": "abc"}) + "\n")
    out = io.StringIO()
    train(config_for(dataset=str(path), max_steps=1), PlainConsole(out))
    assert f"warning: {path}: no token left out of the loss, not even the prompt's: 1 row (1)" in out.getvalue()


def test_what_is_wrong_is_found_before_weights_are_read(config_for, tmp_path, monkeypatch) -> None:
    def too_late(*args, **kwargs):
        raise AssertionError("something of the model's size was allocated or read")

    monkeypatch.setattr("slideformer.model.weights.load", too_late)
    monkeypatch.setattr("slideformer.engine.engine.State", too_late)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 64, "completion": "y"}) + "\n")
    with pytest.raises(BadInput, match="no target tokens left"):
        run(config_for(dataset=str(long), max_length=32))
    with pytest.raises(BadInput, match="dropout"):
        run(config_for(model=make_model(tmp_path / "dropout", attention_dropout=0.1)))
    with pytest.raises(DoesNotFit, match="this run needs .* more than the 1.0 MiB of max_host_memory"):
        run(config_for(max_host_memory="1MiB"))
    with pytest.raises(BadInput, match="is not a folder"):
        run(config_for(model=tmp_path / "nowhere"))
    other = make_model(tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(BadInput, match="model.safetensors"):
        run(config_for(model=other))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"output_dir .* cannot be made"):
        run(config_for(output_dir=str(tmp_path / "file" / "out")))
