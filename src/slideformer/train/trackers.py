"""report_to: the run's metrics for TensorBoard, trackio, Weights & Biases and MLflow.

A tracker never stops or slows training. Each works in a thread of its own behind a queue; when it fails, or cannot keep
up, that is said once and it is left alone. Only a package that is not installed is an error, before the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Literal, Protocol, Self

from pydantic import JsonValue

from slideformer.config import TrackerName, TrainConfig
from slideformer.errors import BadInput
from slideformer.train.metrics import Metrics
from slideformer.train.redact import redacted
from slideformer.train.stop import AT_ONCE_S, Stopped

QUEUE_LINES = 1000  # some minutes of a tracker that does not answer, at several steps a second
END_S = 30.0  # how long the end of a run waits for what is still queued
PROJECT = "slideformer"  # where nothing else is said (WANDB_PROJECT, TRACKIO_PROJECT, MLFLOW_EXPERIMENT_NAME)
MLFLOW_PLACES = {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"}  # each says where runs go
MLFLOW_REFUSED = re.compile(r"[^A-Za-z0-9_\-. :/]")  # in the name of a metric, as of an evaluation set with any name
Numbers = Mapping[str, float]
Texts = Mapping[str, str]
Ended = Literal["finished", "stopped", "failed"]  # as in run.json


class Tracker(Protocol):
    """Made, used and closed in one thread. Free to raise."""

    def log(self, numbers: Numbers, step: int) -> None: ...
    def log_texts(self, texts: Texts, step: int) -> None: ...
    def close(self, ended: Ended) -> None: ...


class _TensorBoard:
    """Event files in output_dir/tensorboard."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, JsonValue], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step if first_step > 1 else None  # what a run wrote after the checkpoint it goes on from
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, numbers: Numbers, step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, texts: Texts, step: int) -> None:
        for name, text in texts.items():
            self._writer.add_text(name, text, step)

    def close(self, ended: Ended) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, JsonValue], first_step: int) -> None:
        self._trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        resume = "allow" if first_step > 1 else "never"
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}  # the run's own numbers are enough
        self._trackio.init(project=project, name=name, config=dict(settings), resume=resume, **quiet)

    def log(self, numbers: Numbers, step: int) -> None:
        self._trackio.log(dict(numbers), step=step)

    def log_texts(self, texts: Texts, step: int) -> None:
        self._trackio.log({name: self._trackio.Markdown(text) for name, text in texts.items()}, step=step)

    def close(self, ended: Ended) -> None:
        self._trackio.finish()


class _Wandb:
    """A run of its own; or the one that the caller has open, as in a sweep, which stays open."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, JsonValue], first_step: int) -> None:
        self._wandb = wandb = importlib.import_module("wandb")
        self._joined = wandb.run is not None
        if self._joined:
            self._run = wandb.run
            self._run.config.update(dict(settings), allow_val_change=True)
        else:
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            self._run = wandb.init(project=project, name=name, config=dict(settings), dir=str(folder))

    def log(self, numbers: Numbers, step: int) -> None:
        self._log(dict(numbers), step)

    def log_texts(self, texts: Texts, step: int) -> None:
        rows = [[step, name, text] for name, text in texts.items()]
        self._log({"samples": self._wandb.Table(columns=["step", "sample", "text"], data=rows)}, step)

    def _log(self, values: dict[str, object], step: int) -> None:
        if self._joined:  # it drops what comes with a step before its own, and its owner counts that one
            self._run.log(values | {"global_step": step})
        else:
            self._run.log(values, step=step)

    def close(self, ended: Ended) -> None:
        if not self._joined:
            self._run.finish(exit_code={"finished": 0, "stopped": 255, "failed": 1}[ended])  # 255: its word for Ctrl-C


class _Mlflow:
    """A run of its own; or the one of MLFLOW_RUN_ID, whose parameters cannot be changed and stay as they are."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, JsonValue], first_step: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        where = None
        if not MLFLOW_PLACES & os.environ.keys():  # not set_experiment, which holds for the whole process
            found = self._mlflow.get_experiment_by_name(PROJECT)
            where = found.experiment_id if found else self._mlflow.create_experiment(PROJECT)
        known = self._mlflow.start_run(run_name=name, experiment_id=where).data.params
        self._mlflow.log_params({key: str(value) for key, value in settings.items() if key not in known})

    def log(self, numbers: Numbers, step: int) -> None:
        self._mlflow.log_metrics({MLFLOW_REFUSED.sub("_", k): v for k, v in numbers.items()}, step=step)

    def log_texts(self, texts: Texts, step: int) -> None:
        for name, text in texts.items():
            self._mlflow.log_text(text, f"{name}/step-{step}.md")

    def close(self, ended: Ended) -> None:
        self._mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ended])


MAKERS: dict[TrackerName, Callable[[str, Path, Mapping[str, JsonValue], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def require_trackers(config: TrainConfig) -> None:
    """Raise BadInput for a tracker whose package is not installed."""
    for name in config.report_to:
        if importlib.util.find_spec(name) is None:
            raise BadInput(
                f"report_to names {name}, which is not installed: pip install 'slideformer[trackers]' (or {name} "
                "alone), or leave it out"
            )


class Trackers:
    """All of a run's trackers. Context manager: its end waits END_S at most for what is queued, or AT_ONCE_S."""

    def __init__(self, config: TrainConfig, warn: Callable[[str], None], *, first_step: int = 1) -> None:
        """warn: called in the caller's thread, once for each tracker that fails."""
        folder = Path(config.output_dir)
        settings = redacted(config.model_dump(mode="json"))
        assert isinstance(settings, dict)
        name = config.run_name or folder.name
        self._warn = warn
        self._workers = [
            _Worker(kind, lambda make=MAKERS[kind]: make(name, folder, settings, first_step))
            for kind in config.report_to
        ]

    def log(self, metrics: Metrics) -> None:
        """Queue the numbers that there are. Never blocks and never raises."""
        step = int(metrics["global_step"] or 0)
        numbers = {k: float(v) for k, v in metrics.items() if v is not None and k != "global_step"}
        self._put(lambda tracker: tracker.log(numbers, step))

    def log_texts(self, texts: Texts, step: int) -> None:
        """Queue texts (markdown), each under its name. Never blocks and never raises."""
        self._put(lambda tracker: tracker.log_texts(texts, step))

    def _put(self, told: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.put(told)
        self._tell()

    def _tell(self) -> None:
        for worker in self._workers:
            if worker.failure is not None and not worker.told:
                worker.told = True
                self._warn(f"{worker.name} gets nothing more of this run: {worker.failure}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *where: object) -> None:
        at_once = isinstance(error, Stopped) and error.at_once
        deadline = time.monotonic() + (AT_ONCE_S if at_once else END_S)
        ended: Ended = "finished" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
        for worker in self._workers:
            worker.end(deadline, ended)
        self._tell()


class _Worker:
    """The thread of one tracker. failure: why it has stopped, as the end of a sentence."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self.told, self._make = name, False, make
        self.failure: str | None = None
        self._ended: Ended = "failed"
        self._queue: Queue[Callable[[Tracker], None] | None] = Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._work, name=f"slideformer-{name}", daemon=True)
        self._thread.start()

    def put(self, told: Callable[[Tracker], None]) -> None:
        if self.failure is None:
            try:
                self._queue.put_nowait(told)
            except Full:
                self.failure = f"it has not taken the last {QUEUE_LINES} lines"

    def end(self, deadline: float, ended: Ended) -> None:
        """Let it finish what is queued, until the deadline (of time.monotonic)."""
        self._ended = ended
        if self.failure is None:
            try:
                self._queue.put(None, timeout=max(deadline - time.monotonic(), 0.0))
                self._thread.join(max(deadline - time.monotonic(), 0.0))
                late = self._thread.is_alive()
            except Full:
                late = True
            if late:
                self.failure = f"it did not take the last lines within {END_S:.0f} s"

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (told := self._queue.get()) is not None and self.failure is None:
                told(tracker)
            tracker.close(self._ended)
        except BaseException as error:  # SystemExit too: some packages leave so when a login fails
            lines = str(error).strip().splitlines()
            self.failure = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
            self._empty()

    def _empty(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            pass
