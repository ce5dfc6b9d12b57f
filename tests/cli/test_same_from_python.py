"""A run with everything on, from the command line and from Python: the same numbers, in every place they are told."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slideformer import TrainConfig, Trainer
from slideformer.train.console import PlainConsole
from train.test_python_api import timeless

SETTINGS = {
    "max_length": 64,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "eval_steps": 3,
    "learning_rate": 1e-3,
    "report_to": ["tensorboard", "trackio"],
    "device": "cpu",
    "cpu_threads": 1,
    "tile_numel": 4096,
}


def write_rows(folder: Path) -> dict[str, str]:
    """An Alpaca-style file, a ShareGPT-style one, and another of those to evaluate on."""
    chance = random.Random(5)

    def pair() -> tuple[str, str]:
        a, b = chance.randrange(50), chance.randrange(50)
        return f"{a}+{b}", str(a + b)

    alpaca = [{"instruction": "add", "input": asked, "output": said} for asked, said in (pair() for _ in range(30))]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    for name, count in (("sharegpt", 30), ("held", 6)):
        talks = []
        for _ in range(count):
            turns = []
            for asked, said in (pair(), pair()):
                turns += [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]
            talks.append({"conversations": turns})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return {"train": [str(folder / "alpaca.json"), str(folder / "sharegpt.jsonl")], "held": str(folder / "held.jsonl")}


def test_from_the_command_line_and_from_python(slideformer, yaml_for, tmp_path, toy) -> None:
    files = write_rows(tmp_path)
    config = yaml_for(**{**SETTINGS, "dataset": files["train"], "eval_dataset": files["held"], "run_name": "line"})
    done = slideformer("train", config)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert "gets nothing more" not in done.stdout

    given = {**SETTINGS, "dataset": files["train"], "output_dir": str(tmp_path / "python"), "run_name": "python"}
    args = TrainConfig(**given, eval_dataset=files["held"])
    with Trainer(str(toy / "model"), args, console=PlainConsole(io.StringIO())) as trainer:
        result = trainer.train()
    assert timeless(trainer.state.log_history) == timeless(lines)
    assert result.metrics["loss"] == lines[-2]["loss"]
    assert (tmp_path / "python/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()

    scalars = []
    for run in ("out", "python"):
        events = EventAccumulator(str(tmp_path / run / "tensorboard"))
        events.Reload()
        scalars.append([(event.step, event.value) for event in events.Scalars("loss")])
    assert scalars[0] == scalars[1]

    from trackio.sqlite_storage import SQLiteStorage  # not before the fixtures have said where

    logged = [
        [r["loss"] for r in SQLiteStorage.get_logs("slideformer", name) if "loss" in r] for name in ("line", "python")
    ]
    assert logged[0] == logged[1] == [line["loss"] for line in lines if "loss" in line]
