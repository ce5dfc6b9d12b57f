"""auto_find_batch_size: what has no room goes through the model in parts, and the run is the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from slideformer.config import TrainConfig
from slideformer.data.batches import MicroBatch
from slideformer.engine.feed import in_parts
from slideformer.errors import DoesNotFit
from slideformer.train.console import PlainConsole
from slideformer.train.plan import plan_run
from slideformer.train.trainer import train

STEPS = {"max_steps": 3, "val_size": 7, "eval_steps": 3}
ROWS = {"per_device_train_batch_size": 8, **STEPS, "offload_activations": "cpu", "window": 2}
"""Saved inputs pass through a ring, which is smaller where fewer rows go together; on a CPU that is all that is, beside
a smaller window."""


def losses(config: TrainConfig) -> list[float]:
    train(config, PlainConsole(io.StringIO()))
    lines = [json.loads(text) for text in (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "eval_loss", "grad_norm") if key in line]


def room_for(config: TrainConfig, rows: int) -> int:
    """Bytes that a run with so many rows at a time takes."""
    size = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": -(-8 // rows)}
    found = plan_run(config.model_copy(update=size))
    return found.budget.on_one_tier().host_nbytes


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("program", [{}, {"max_grad_norm": 0.0, "update": "eager"}], ids=["deferred", "eager"])
def test_a_run_in_parts_is_the_run(config_for, caplog, packing, program):
    whole = config_for(**ROWS, packing=packing, **program)
    limit = {"max_host_memory": room_for(whole, 1)}
    with pytest.raises(DoesNotFit, match="max_host_memory"):
        losses(config_for(**ROWS, packing=packing, **program, **limit))
    parts = config_for(**ROWS, packing=packing, **program, **limit, auto_find_batch_size=True)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    assert "micro-batches of 8 rows have no room here: each is taken as 8 of 1" in caplog.text


def test_a_plan_says_how_many_rows_go_together(config_for):
    config = config_for(**ROWS, auto_find_batch_size=True)
    assert plan_run(config).as_dict()["micro_batch_size"] == 8
    assert "sequences of 48 tokens: " in plan_run(config).text()
    tight = plan_run(config.model_copy(update={"max_host_memory": room_for(config, 1)}))
    assert tight.as_dict()["micro_batch_size"] == 1
    assert "8 x 1 sequences of 48 tokens, 1 at a time: " in tight.text()
    tight.require_fit()


def test_what_does_not_fit_in_parts_either_is_told_as_it_was_asked_for(config_for):
    config = config_for(**ROWS, auto_find_batch_size=True, max_host_memory="1KiB")
    assert plan_run(config).as_dict()["micro_batch_size"] == 8
    with pytest.raises(DoesNotFit, match="max_host_memory"):
        losses(config)


def test_parts_have_all_rows_and_columns():
    ids = torch.arange(15).view(5, 3)
    micro = [MicroBatch(ids, ids + 100, None, ids + 200), MicroBatch(ids[:2], ids[:2], ids[:2] > 0)]
    parts = in_parts(micro, 2)
    assert [len(part.input_ids) for part in parts] == [2, 2, 1, 2]
    assert torch.equal(torch.cat([part.input_ids for part in parts[:3]]), ids)
    assert torch.equal(torch.cat([part.labels for part in parts[:3]]), ids + 100)
    assert torch.equal(torch.cat([part.position_ids for part in parts[:3]]), ids + 200)
    assert parts[0].attention_mask is None and torch.equal(parts[3].attention_mask, ids[:2] > 0)
    assert in_parts(micro, 9)[0].input_ids.shape == (5, 3)


def test_a_resume_says_that_a_step_is_split_in_another_way(config_for):
    fields = {**ROWS, "save_steps": 1, "lr_scheduler_type": "constant", "auto_find_batch_size": True}
    whole = config_for(**fields)
    tight = {"max_host_memory": room_for(whole, 1)}
    losses(whole)

    def go_on(steps: int, **limit) -> str:
        told = io.StringIO()
        train(
            whole.model_copy(update={"max_steps": steps, "resume_from_checkpoint": "auto", **limit}), PlainConsole(told)
        )
        return told.getvalue()

    split = (
        "the last bits may differ from an unbroken run's: per_device_train_batch_size was {} and is now {}; per_device"
    )
    no_room = "warning: what checkpoint-4 was made with has no room here, so "
    assert "last bits" not in go_on(4)
    assert no_room + split.format("8", "8, 1 at a time") in go_on(5, **tight)
    assert "last bits" not in go_on(6, **tight)
    told = go_on(7)
    assert "last bits" not in told, "as it was, though all have room together again"
    assert "sequences of up to 48 tokens, 1 at a time, " in told
    assert f"warning: {split.format('8, 1 at a time', '8')}" in go_on(8, auto_find_batch_size=False)
