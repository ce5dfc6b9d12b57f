"""report_to with the real packages (wandb and mlflow: with what stands in for them, call by call), and what a tracker
may do wrong without harm to the run."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.utils.tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

from slideformer.errors import BadInput, RunFailed
from slideformer.train import trackers
from slideformer.train.console import PlainConsole
from slideformer.train.stop import Stopped
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


class OtherWandb(ModuleType):
    """What stands in for wandb: the calls that were seen to work with 0.31, with their signatures, recording."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: OtherRun | None = None
        self.made: list[OtherRun] = []

    def init(self, entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None):
        self.run = OtherRun(project, dir, name, config, self)
        self.made.append(self.run)
        return self.run

    class Table:
        def __init__(self, columns=None, data=None, rows=None) -> None:
            self.columns, self.data = columns, data


class OtherRun:
    def __init__(self, project, dir, name, config, module) -> None:
        self.project, self.dir, self.name, self.settings, self._module = project, dir, name, dict(config or {}), module
        self.rows: dict[int, dict] = {}
        self.exit_code: int | None = None
        self.step = 0
        self.config = SimpleNamespace(update=self._update)

    def _update(self, d, allow_val_change=None) -> None:
        assert allow_val_change or not self.settings.keys() & d.keys(), "config values cannot be changed"
        self.settings |= d

    def log(self, data, step=None, commit=None) -> None:
        assert self.exit_code is None, "the run is finished"
        if step is not None and step < self.step:
            return  # with a warning of its own
        self.rows.setdefault(self.step if step is None else step, {}).update(data)
        self.step = self.step + 1 if step is None else step

    def finish(self, exit_code=None) -> None:
        self.exit_code, self._module.run = exit_code or 0, None


class OtherMlflow(ModuleType):
    """What stands in for mlflow: as 3.17, with its checks of names and of parameters that are there already."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}
        self._here: SimpleNamespace | None = None

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name, artifact_location=None, tags=None, trace_location=None):
        assert name not in self.experiments, "there is one with this name"
        self.experiments[name] = str(len(self.experiments) + 1)
        return self.experiments[name]

    def start_run(self, run_id=None, experiment_id=None, run_name=None, nested=False):
        run_id = run_id or os.environ.pop("MLFLOW_RUN_ID", None) or f"run-{len(self.runs)}"
        experiment = experiment_id or os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        new = SimpleNamespace(data=SimpleNamespace(params={}), metrics=[], texts={})
        self._here = self.runs.setdefault(run_id, new)
        self._here.name, self._here.experiment, self._here.status = run_name, experiment, "RUNNING"
        return self._here

    def log_params(self, params, synchronous=None, run_id=None) -> None:
        known = self._here.data.params
        assert all(known.get(key, value) == value for key, value in params.items()), "parameters cannot be changed"
        known.update(params)

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None) -> None:
        assert all(re.fullmatch(r"[A-Za-z0-9_\-. :/]+", name) for name in metrics), "a name it does not take"
        self._here.metrics += [(name, step, value) for name, value in metrics.items()]

    def log_text(self, text, artifact_file, run_id=None) -> None:
        self._here.texts[artifact_file] = text

    def end_run(self, status="FINISHED") -> None:
        self._here.status = status


@pytest.fixture
def wandb(monkeypatch) -> OtherWandb:
    return installed(monkeypatch, OtherWandb())


@pytest.fixture
def mlflow(monkeypatch) -> OtherMlflow:
    for name in trackers.MLFLOW_PLACES:
        monkeypatch.delenv(name, raising=False)
    return installed(monkeypatch, OtherMlflow())


def installed(monkeypatch, module):
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


SAMPLES = {"generate_steps": 2, "generate_prompts": ("3+4", "a longer one"), "generate_max_new_tokens": 3}
EVERYTHING = {"max_steps": 4, "eval_steps": 2, "run_name": "mine", **SAMPLES}


def numbers_of(config) -> list[tuple[str, int, float]]:
    """(name, step, value) of metrics.jsonl, in order of name and step."""
    lines = read_metrics(config)
    found = [(k, line["global_step"], v) for line in lines for k, v in line.items() if v is not None]
    return sorted(one for one in found if one[0] != "global_step")


def texts_of(config) -> dict[tuple[int, str], str]:
    """(step, name) -> markdown, of generations.jsonl."""
    lines = map(json.loads, Path(config.output_dir, "generations.jsonl").read_text().splitlines())
    names = {prompt: f"samples/{number}" for number, prompt in enumerate(SAMPLES["generate_prompts"], 1)}
    return {(x["global_step"], names[x["prompt"]]): f"**{x['prompt']}**\n\n{x['text']}" for x in lines}


def test_wandb_gets_a_row_a_step_and_tables_of_samples(config_for, wandb) -> None:
    config = config_for(val_size=4, report_to="wandb", **EVERYTHING)
    assert "gets nothing more" not in told(config)
    [run] = wandb.made
    assert (run.project, run.name, run.dir, run.exit_code) == ("slideformer", "mine", config.output_dir, 0)
    assert run.settings["max_steps"] == 4
    tables = {step: row.pop("samples") for step, row in run.rows.items() if "samples" in row}
    assert sorted((k, step, v) for step, row in run.rows.items() for k, v in row.items()) == sorted(
        {(k, step): (k, step, float(v)) for k, step, v in numbers_of(config)}.values()
    )
    assert {(row[0], row[1]): row[2] for table in tables.values() for row in table.data} == texts_of(config)
    assert list(tables) == [2, 4] and tables[2].columns == ["step", "sample", "text"]


def test_a_wandb_run_of_the_caller_is_used_and_left_open(config_for, wandb) -> None:
    mine = wandb.init(project="sweep", config={"max_steps": 1})
    mine.log({"before": 1.0}, step=100)
    config = config_for(max_steps=2, report_to="wandb")
    assert "gets nothing more" not in told(config)
    assert wandb.made == [mine] and mine.exit_code is None and mine.settings["max_steps"] == 2
    rows = [(row["global_step"], row["loss"]) for row in mine.rows.values() if "loss" in row]
    assert rows == [(line["global_step"], line["loss"]) for line in read_metrics(config)]


def test_mlflow_gets_every_number_and_files_of_samples(config_for, tmp_path, mlflow) -> None:
    given = {**EVERYTHING, "report_to": "mlflow"}
    rows = str(tmp_path / "rows.jsonl")
    config = config_for(eval_dataset={"a b": rows, "später!": rows}, **given)
    assert "gets nothing more" not in told(config)
    [run] = mlflow.runs.values()
    assert (run.name, run.experiment, run.status) == ("mine", mlflow.experiments["slideformer"], "FINISHED")
    assert run.data.params["max_steps"] == "4"
    expected = [(name.replace("später!", "sp_ter_"), step, float(value)) for name, step, value in numbers_of(config)]
    assert sorted(run.metrics) == sorted(expected)
    assert {"eval_a b_loss", "eval_sp_ter__loss"} < {name for name, *_ in run.metrics}
    assert run.texts == {f"{name}/step-{step}.md": text for (step, name), text in texts_of(config).items()}


def test_mlflow_goes_where_its_variables_say(config_for, mlflow, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    assert "gets nothing more" not in told(config_for(max_steps=1, report_to="mlflow"))
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")  # it takes it away
    assert "gets nothing more" not in told(config_for(max_steps=2, report_to="mlflow"))
    assert not mlflow.experiments and list(mlflow.runs) == ["mine"]
    run = mlflow.runs["mine"]
    assert run.experiment == "7" and run.data.params["max_steps"] == "1"
    assert [step for name, step, _ in run.metrics if name == "loss"] == [1, 1, 2]
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    for _ in range(2):
        told(config_for(max_steps=1, report_to="mlflow"))
    assert [one.experiment for one in list(mlflow.runs.values())[1:]] == ["1", "1"]


@pytest.mark.parametrize(
    ("error", "exit_code", "status"),
    [(Stopped(signal.SIGINT, "after step 2"), 255, "KILLED"), (RunFailed("the loss is not finite"), 1, "FAILED")],
)
def test_a_run_that_does_not_finish_is_not_called_finished(config_for, wandb, mlflow, error, exit_code, status) -> None:
    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            if state.global_step == 2:
                raise error

    with pytest.raises(type(error)):
        told(config_for(max_steps=3, report_to=["wandb", "mlflow"]), callbacks=[Ends()])
    assert wandb.made[0].exit_code == exit_code
    assert [run.status for run in mlflow.runs.values()] == [status]


@pytest.mark.parametrize("call", ["log", "finish"])
def test_a_wandb_that_raises_changes_nothing_of_the_run(config_for, wandb, monkeypatch, call) -> None:
    weights = Path(config_for().output_dir, "model.safetensors")
    alone = config_for(max_steps=4)
    told(alone)
    expected = weights.read_bytes(), [line["loss"] for line in read_metrics(alone)]

    def fails(self, *given, **named) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(OtherRun, call, fails)
    config = config_for(max_steps=4, report_to="wandb")
    out = told(config)
    assert out.count("warning: wandb gets nothing more of this run: ConnectionError: the server is gone") == 1
    assert (weights.read_bytes(), [line["loss"] for line in read_metrics(config)]) == expected
    assert json.loads(Path(config.output_dir, "run.json").read_text())["status"] == "finished"
