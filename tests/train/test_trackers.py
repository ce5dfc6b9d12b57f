"""report_to with the real packages, and what a tracker may do wrong without harm to the run."""

from __future__ import annotations

import io
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch.utils.tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slideformer.errors import BadInput
from slideformer.train import trackers
from slideformer.train.console import PlainConsole
from slideformer.train.trainer import Trainer, train
from train.test_trainer import read_metrics

WRITER = torch.utils.tensorboard.SummaryWriter


def told(config, **given) -> str:
    out = io.StringIO()
    with Trainer(args=config, console=PlainConsole(out), **given) as trainer:
        trainer.train()
    return out.getvalue()


def test_trackers_get_every_number_under_its_own_name(config_for) -> None:
    config = config_for(max_steps=3, val_size=4, report_to=["tensorboard", "trackio"], run_name="mine")
    assert "gets nothing more" not in told(config)
    events = EventAccumulator(f"{config.output_dir}/tensorboard")
    events.Reload()
    lines = read_metrics(config)
    names = {name for line in lines for name in line} - {"global_step"}
    assert set(events.Tags()["scalars"]) == names
    for name in names:
        expected = [(line["global_step"], line[name]) for line in lines if line.get(name) is not None]
        found = events.Scalars(name)
        assert [event.step for event in found] == [step for step, _ in expected]
        assert [event.value for event in found] == pytest.approx([value for _, value in expected], rel=1e-6)  # fp32

    from trackio.sqlite_storage import SQLiteStorage  # not before the fixtures have said where

    logged = SQLiteStorage.get_logs("slideformer", "mine")
    for name in names:
        expected = [(line["global_step"], line[name]) for line in lines if line.get(name) is not None]
        assert [(entry["step"], entry[name]) for entry in logged if name in entry] == expected, name


def test_a_run_that_goes_on_replaces_what_was_logged_after_its_checkpoint(config_for) -> None:
    fields = {"max_steps": 4, "save_steps": 2, "report_to": "tensorboard"}
    config = config_for(**fields)
    train(config, PlainConsole(io.StringIO()))
    shutil.rmtree(f"{config.output_dir}/checkpoint-4")
    time.sleep(1.1)  # event files are named by the second
    train(config_for(**fields, resume_from_checkpoint=True), PlainConsole(io.StringIO()))
    events = EventAccumulator(f"{config.output_dir}/tensorboard", purge_orphaned_data=True)
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


class Broken(WRITER):
    def add_scalar(self, *given, **named) -> None:
        raise ConnectionError("the server is gone")


class Unborn(WRITER):
    def __init__(self, *given, **named) -> None:
        raise SystemExit("no login")


@pytest.mark.parametrize(
    ("writer", "why"), [(Broken, "ConnectionError: the server is gone"), (Unborn, "SystemExit: no login")]
)
def test_a_tracker_that_fails_is_left_alone_after_one_warning(config_for, monkeypatch, writer, why) -> None:
    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", writer)
    config = config_for(max_steps=6, report_to="tensorboard")
    out = told(config)
    assert out.count(f"warning: tensorboard gets nothing more of this run: {why}") == 1
    assert [line["global_step"] for line in read_metrics(config)] == [1, 2, 3, 4, 5, 6]
    assert json.loads(Path(config.output_dir, "run.json").read_text())["status"] == "finished"


def test_a_tracker_that_hangs_holds_nothing_up(config_for, monkeypatch) -> None:
    let_go = threading.Event()

    class Hanging(WRITER):
        def add_scalar(self, *given, **named) -> None:
            let_go.wait()

    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", Hanging)
    monkeypatch.setattr(trackers, "QUEUE_LINES", 3)
    config = config_for(max_steps=8, report_to="tensorboard")
    try:
        out = told(config)
    finally:
        let_go.set()
    assert "warning: tensorboard gets nothing more of this run: it has not taken the last 3 lines" in out
    monkeypatch.setattr(trackers, "QUEUE_LINES", 100)
    monkeypatch.setattr(trackers, "END_S", 0.2)
    let_go.clear()
    try:
        out = told(config_for(max_steps=2, report_to="tensorboard"))
    finally:
        let_go.set()
    assert "it did not take the last lines within 0 s" in out


def test_a_package_that_is_not_there_is_told_before_anything_is_loaded(config_for, monkeypatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"report_to names mlflow, which is not installed: pip install 'slideformer\[tr"):
        told(config_for(max_steps=1, report_to="mlflow"))
