"""Packed and streamed rows through the real engine."""

from __future__ import annotations

import io
import json

import pytest

from slideformer.train.console import PlainConsole
from slideformer.train.trainer import train
from train.toy import write_sums


def run(config) -> list[dict]:
    train(config, PlainConsole(io.StringIO()))
    with open(f"{config.output_dir}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_step_over_packed_rows_is_the_step_over_the_same_rows_alone(config_for, tmp_path, attention) -> None:
    """All 24 rows in one step: 24 rows of one sample, or a few of several. fp32, sums in another order."""
    fields = {
        "max_steps": 2,
        "attn_implementation": attention,
        "eval_dataset": str(write_sums(tmp_path / "held.jsonl", 7, 5)),
    }
    fields |= {"eval_steps": 1, "max_length": 64, "lr_scheduler_type": "constant"}
    alone = run(config_for(per_device_train_batch_size=24, **fields))
    packed = run(config_for(per_device_train_batch_size=24, packing=True, **fields))
    sums = json.loads((tmp_path / "out/run.json").read_text())["data"][0]
    assert 1 < sums["packs"] <= 12
    for one, other in zip(alone, packed, strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=2e-5)
        for name in ("num_input_tokens_seen", "num_target_tokens_seen"):
            assert other.get(name) == one.get(name)


def test_a_packed_run_that_goes_on_equals_one_that_was_not_broken(config_for, tmp_path) -> None:
    fields = {"packing": True, "max_length": 64, "per_device_train_batch_size": 1, "save_steps": 3}
    whole = run(config_for(output_dir=str(tmp_path / "whole"), max_steps=9, lr_scheduler_type="constant", **fields))
    run(config_for(max_steps=6, lr_scheduler_type="constant", **fields))
    rest = run(config_for(max_steps=9, lr_scheduler_type="constant", resume_from_checkpoint=True, **fields))
    assert [(m["loss"], m["grad_norm"]) for m in rest] == [(m["loss"], m["grad_norm"]) for m in whole]


def test_a_streamed_run_trains_saves_and_goes_on(config_for, tmp_path) -> None:
    fields = {"streaming": True, "shuffle_buffer_size": 8, "save_steps": 3, "lr_scheduler_type": "constant"}
    whole = run(config_for(output_dir=str(tmp_path / "whole"), max_steps=8, **fields))
    run(config_for(max_steps=3, **fields))
    rest = run(config_for(max_steps=8, resume_from_checkpoint=True, **fields))
    assert [m["loss"] for m in rest] == [m["loss"] for m in whole]
    assert rest[-1]["loss"] < rest[0]["loss"]
