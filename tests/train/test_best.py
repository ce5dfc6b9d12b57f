"""The best checkpoint and early stopping: the rule by itself, and in runs that also go on."""

from __future__ import annotations

import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from slideformer.errors import BadInput
from slideformer.train.best import Judge, Rule
from slideformer.train.console import PlainConsole
from slideformer.train.evaluation import evaluate
from slideformer.train.trainer import Trainer
from train.test_trainer import read_metrics


def judge(values, **rule) -> Judge:
    found = Judge(Rule("eval_loss", **rule))
    for step, value in enumerate(values, start=1):
        found.add(step, {"eval_loss": value})
    return found


@pytest.mark.parametrize(
    ("values", "rule", "best", "exhausted"),
    [
        ([3.0, 2.0, 1.0], {"patience": 1}, (3, 1.0), False),
        ([3.0, 1.0, 2.0], {"patience": 1}, (2, 1.0), True),
        ([3.0, 1.0, 2.0], {"patience": 2}, (2, 1.0), False),
        ([3.0, 1.0, 1.0, 1.0], {"patience": 2}, (2, 1.0), True),
        ([3.0, 2.9, 2.8, 2.7], {"patience": 2, "threshold": 0.5}, (4, 2.7), True),
        ([1.0, 2.0, 1.5], {"greater": True, "patience": 1}, (2, 2.0), True),
        ([1.0, float("nan"), None], {"patience": 1}, (1, 1.0), False),
        ([], {"patience": 1}, None, False),
        ([1.0, 2.0, 3.0], {}, (1, 1.0), False),
    ],
)
def test_the_rule(values, rule, best, exhausted) -> None:
    found = judge(values, **rule)
    assert found.best == best
    assert found.exhausted == exhausted


def test_the_best_checkpoint_is_the_best_of_those_that_were_saved() -> None:
    found = judge([3.0, 1.0, 2.0, 2.5])
    for step in (1, 3, 4):
        found.saved(step)
    assert found.best == (2, 1.0)
    assert found.best_saved == 3


RISING = {  # the rate is far too high, so the loss on unseen rows soon rises
    "max_steps": 6, "val_size": 4, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.1,
    "warmup_steps": 0, "lr_scheduler_type": "constant", "save_total_limit": 1, "load_best_model_at_end": True,
}  # fmt: skip


def run(config, **fields) -> Trainer:
    with Trainer(args=config, console=PlainConsole(io.StringIO()), **fields) as trainer:
        trainer.train()
    return trainer


def test_the_result_is_the_best_checkpoints(config_for, tmp_path) -> None:
    config = config_for(**RISING)
    with Trainer(args=config, console=PlainConsole(io.StringIO())) as trainer:
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    losses = {m["global_step"]: m["eval_loss"] for m in read_metrics(config) if "eval_loss" in m}
    best = min(losses, key=losses.get)
    assert best < 6, "the toy did not get worse: the test would not see it"
    assert after == losses[best]
    kept = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == sorted([f"checkpoint-{best}", "checkpoint-6"])  # the limit of 1 does not cost the best one
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = config_for(**{**RISING, "output_dir": str(tmp_path / "again"), "max_steps": best})
    run(config)
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=0, atol=0, msg=name)


def test_a_run_ends_early_and_goes_on_no_further_when_it_is_taken_up(config_for, tmp_path) -> None:
    config = config_for(**{**RISING, "early_stopping_patience": 2, "load_best_model_at_end": False})
    out = io.StringIO()
    with Trainer(args=config, console=PlainConsole(out)) as trainer:
        result = trainer.train()
    losses = {m["global_step"]: m["eval_loss"] for m in read_metrics(config) if "eval_loss" in m}
    best = min(losses, key=losses.get)
    assert result.global_step == best + 2 < 6
    assert "stopped early: eval_loss has not been better for 2 evaluations" in out.getvalue()
    progress = json.loads((tmp_path / f"out/checkpoint-{best + 2}/trainer.json").read_text())["progress"]
    assert [tuple(pair) for pair in progress["judged"]] == list(losses.items())
    assert progress["best_saved"] == best
    again = run(config_for(**{**RISING, "early_stopping_patience": 2, "load_best_model_at_end": False},
                           resume_from_checkpoint=True))  # fmt: skip
    assert again.state.global_step == best + 2
    assert not [line for line in again.state.log_history if "loss" in line]


def test_a_rate_that_follows_the_metric_is_the_same_in_a_run_that_goes_on(config_for, tmp_path) -> None:
    fields = {**RISING, "lr_scheduler_type": "reduce_lr_on_plateau", "load_best_model_at_end": False,
              "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}, "save_total_limit": None}  # fmt: skip
    straight = read_rates(run(config_for(**fields)))
    assert len(set(straight)) > 2
    import shutil

    for step in range(4, 7):
        shutil.rmtree(tmp_path / f"out/checkpoint-{step}")
    assert read_rates(run(config_for(**fields, resume_from_checkpoint=True))) == straight[3:]


def read_rates(trainer: Trainer) -> list[float]:
    return [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]


def test_a_metric_that_no_evaluation_gives_is_told_with_those_that_are(config_for) -> None:
    with pytest.raises(
        BadInput, match="metric_for_best_model is eval_bleu, .*: choose from eval_loss, eval_perplexity"
    ):
        run(config_for(**{**RISING, "metric_for_best_model": "bleu"}))


def test_evaluating_by_hand_gives_the_runs_own_figure(config_for) -> None:
    config = config_for(max_steps=2, val_size=4)
    with Trainer(args=config, console=PlainConsole(io.StringIO())) as trainer:
        trainer.train()
        assert evaluate(trainer._engine, trainer._prepared.evaluation) == trainer.evaluate()
