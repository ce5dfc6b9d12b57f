"""A run from its config to a saved model, read from top to bottom.

The loop submits step k+1 before it reads the result of step k, so the lanes never drain between steps.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slideformer.config import TrainConfig
from slideformer.data import Batches, Dataset, MicroBatch, codec_of, evaluation_sets, load_dataset, training_batches
from slideformer.data.batches import StepBatch
from slideformer.device import Device, LaneFailure, open_device
from slideformer.engine import Engine, NonFinite, StepResult
from slideformer.errors import RunFailed
from slideformer.memory import size
from slideformer.model import weights
from slideformer.model.folder import read_config
from slideformer.model.parity import check_parity
from slideformer.train.checkpoint import LoggedSums, Progress
from slideformer.train.console import Console
from slideformer.train.metrics import METRICS, Metrics, MetricsFile, evaluation_metrics, lines_until
from slideformer.train.output import claimed
from slideformer.train.record import RunRecord
from slideformer.train.resume import find_origin
from slideformer.train.retention import Saver
from slideformer.train.save import save
from slideformer.train.schedule import learning_rate, num_steps
from slideformer.train.setup import build_decoder, engine_options, save_dtype
from slideformer.train.stop import Stopped, StopRequests

SPEED_OVER_STEPS = 20  # the time left is judged by the mean of so many steps


@dataclass(frozen=True, slots=True)
class Submitted:
    """A step whose result has not been read yet."""

    number: int  # from 1
    batch: StepBatch
    learning_rate: float
    result: StepResult


def train(config: TrainConfig, console: Console) -> Path:
    """Run the whole of a config and return the folder of the result.

    Raises BadInput and DoesNotFit before anything of the model's size is allocated, RunFailed afterwards, and Stopped
    when a signal asked for the end.
    """
    source, target = Path(config.model_name_or_path), Path(config.output_dir)
    model_config = read_config(source)  # a wrong folder is found before the tokenizer and the data are read
    codec = codec_of(config)
    dataset = load_dataset(config, codec)
    batches = training_batches(dataset, config, codec)
    evaluation = evaluation_sets(dataset, config, codec)
    _tell_data(dataset, console)
    check_parity(model_config, attn_implementation=config.attn_implementation, disable_dropout=config.disable_dropout)
    with open_device(config.device) as device, ExitStack() as held:
        decoder = build_decoder(config, device.kind, device.torch_device)
        weights.check(source, decoder.layout, names=decoder.names)
        held.enter_context(claimed(target))
        origin = find_origin(config, batches, decoder, device.kind, console)
        record = RunRecord(target, config, {"data": [report.as_dict() for report in dataset.reports]})
        with StopRequests() as stop, Engine(decoder, device, engine_options(config)) as engine:
            progress = origin.load(engine, source, console)
            kept = lines_until(target / METRICS, progress.step, evaluated=progress.evaluated) if progress.step else ""
            with MetricsFile(target / METRICS, kept=kept) as metrics_file:
                saver = origin.saver(config, engine, console)
                run = _Run(config, engine, device, batches, evaluation, console, metrics_file, stop, saver, progress)
                run.stop_if_asked("before the first step", progress.step)
                facts = {"device": device.kind, "num_steps": run.num_steps, "memory": engine.memory()}
                record.write("running", **facts, first_step=progress.step + 1)
                run.tell_start()
                try:
                    run.loop()
                    save(engine, source, target, save_dtype(config, decoder))
                except Stopped as stopped:
                    if stopped.at_once:
                        device.abandon(stopped)
                    record.write("stopped", last_metrics=run.last_metrics)
                    raise
                except BaseException as error:
                    record.write("failed", last_metrics=run.last_metrics, error=str(error))
                    raise
            record.write("finished", last_metrics=run.last_metrics)
    console.note(f"the model is in {target}")
    return target


def _tell_data(dataset: Dataset, console: Console) -> None:
    for report in dataset.reports:
        for line in report.lines():
            console.note(line)
        for warning in report.warnings():
            console.warn(warning)


class _Run:
    """The loop and what it needs at every turn."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        device: Device,
        batches: Batches,
        evaluation: Mapping[str, Sequence[MicroBatch]],
        console: Console,
        metrics_file: MetricsFile,
        stop: StopRequests,
        saver: Saver | None,
        progress: Progress,
    ) -> None:
        self.config, self.engine, self.device, self.batches = config, engine, device, batches
        self.evaluation, self.console, self.metrics_file, self.stop = evaluation, console, metrics_file, stop
        self.saver, self._start, self._saved_step = saver, progress, progress.step
        self.num_steps = num_steps(config, batches)
        self.last_metrics: dict[str, float | int | None] = {}
        self._interval = _Interval(progress.logged)
        self._tokens_seen, self._targets_seen = progress.num_input_tokens_seen, progress.num_target_tokens_seen
        self._nonfinite_steps = progress.nonfinite_steps

    def loop(self) -> None:
        """Every step, its metrics, and the evaluations and checkpoints between them."""
        first = self._start.step
        if self.config.eval_on_start if first == 0 else not self._start.evaluated:
            self.evaluate(first, self.batches.step(first - 1).epoch if first else 0.0)
        self._interval.restart()
        waiting: Submitted | None = None
        for index in range(first, self.num_steps):
            submitted = self._submit(index, waiting)
            if waiting is not None:
                self._finish(waiting)
            waiting = submitted
            saves = self._saves_after(index)
            if saves or self._evaluates_after(index) or index + 1 == self.num_steps:
                self._finish(waiting)
                waiting = None
            if self._evaluates_after(index):
                self.evaluate(index + 1, submitted.batch.epoch)
            if saves:
                self._save(index + 1, evaluated=True)
            if waiting is None:
                self._interval.restart()
            if self.saver is None or self._saved_step == index + 1:  # else a signal has come since, and waits a step
                self.stop_if_asked(f"after step {index + 1} of {self.num_steps}", index + 1)

    def _saves_after(self, index: int) -> bool:
        """Whether a checkpoint is due after step `index`, from 0, or has been asked for. The last step has one."""
        number, asked = index + 1, self.stop.take_save()
        if self.saver is None:
            if asked:
                self.console.warn("SIGUSR1 asks for a checkpoint, but save_strategy is no: nothing is saved")
            return False
        every = self.config.save_steps or self.batches.steps_per_epoch
        return asked or self.stop.asked or number % every == 0 or number == self.num_steps

    def _save(self, step: int, *, evaluated: bool) -> None:
        """Write the checkpoint of a step whose result has been read, unless the run started with it."""
        if self.saver is None or self._saved_step == step:
            return
        self.metrics_file.flush()
        progress = Progress(
            step=step,
            num_updates=self.engine.num_updates,
            evaluated=evaluated,
            num_input_tokens_seen=self._tokens_seen,
            num_target_tokens_seen=self._targets_seen,
            nonfinite_steps=self._nonfinite_steps,
            logged=self._interval.sums(),
        )
        self.saver.save(progress)
        self._saved_step = step

    def stop_if_asked(self, where: str, step: int) -> None:
        """Raise Stopped if a signal has come. where, step: how far the run is."""
        saved = self.saver is not None and step > 0 and self._saved_step == step
        what = f"go on from checkpoint-{step} with resume_from_checkpoint: auto" if saved else "nothing was saved"
        self.stop.raise_if_asked(f"{where}: {what}")

    def _submit(self, index: int, waiting: Submitted | None) -> Submitted:
        batch = self.batches.step(index)
        rate = learning_rate(self.config, index, self.num_steps)
        try:
            return Submitted(index + 1, batch, rate, self.engine.step(batch.micro_batches, lr=rate))
        except LaneFailure as error:
            raise _failure(error, waiting) from error

    def _finish(self, step: Submitted) -> None:
        """Wait for a step's result and log it if it is due."""
        try:
            loss, norm, nonfinite = step.result.loss, step.result.grad_norm, step.result.nonfinite
        except LaneFailure as error:
            raise _failure(error, step) from error
        self._tokens_seen += step.batch.num_input_tokens
        self._targets_seen += step.batch.num_target_tokens
        self._nonfinite_steps += nonfinite
        self._interval.add(None if nonfinite else loss, step.batch)
        if step.number % self.config.logging_steps and step.number != self.num_steps:
            return
        speed = self._interval.close()
        metrics = {
            "global_step": step.number,
            "epoch": round(step.batch.epoch, 4),
            "loss": speed.loss,
            "grad_norm": None if nonfinite else norm,
            "learning_rate": step.learning_rate,
            "num_input_tokens_seen": self._tokens_seen,
            "num_target_tokens_seen": self._targets_seen,
            "tokens_per_second": speed.tokens_per_second,
            "step_time": speed.step_s,
            "eta_seconds": self._interval.mean_step_s() * (self.num_steps - step.number),
            "nonfinite_steps": self._nonfinite_steps,
            **self._memory_metrics(),
            **{f"busy_{lane}_pct": 100 * s / speed.step_s for lane, s in step.result.busy_s().items()},
        }
        self._log(metrics)
        self.console.step(metrics, self.num_steps)

    def _evaluates_after(self, index: int) -> bool:
        """Whether an evaluation is due after step `index`, from 0. The last step always has one, if any has."""
        number = index + 1
        if self.config.eval_strategy == "no":
            return False
        every = self.config.eval_steps or self.batches.steps_per_epoch
        return number % every == 0 or number == self.num_steps

    def evaluate(self, step: int, epoch: float) -> None:
        """The loss of every evaluation set, per target token over the whole set."""
        metrics: dict[str, float | int | None] = {"global_step": step, "epoch": round(epoch, 4)}
        for name, micro_batches in self.evaluation.items():
            loss_sum, num_targets = 0.0, 0
            for micro_batch in micro_batches:
                loss, targets = self.engine.evaluate([micro_batch])
                loss_sum, num_targets = loss_sum + loss, num_targets + targets
                if self.stop.asked:
                    self._save(step, evaluated=False)
                    self.stop_if_asked(f"in the evaluation after step {step}", step)
            metrics |= evaluation_metrics(name, loss_sum, num_targets)
        self._log(metrics)
        self.console.evaluation(metrics)

    def _log(self, metrics: Metrics) -> None:
        self.metrics_file.write(metrics)
        self.last_metrics |= metrics

    def _memory_metrics(self) -> dict[str, float]:
        found = {
            "host_mem_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "pinned_gib": self.device.page_locked_nbytes / 2**30,
        }
        if self.device.kind == "cuda":
            found["gpu_mem_peak_gib"] = self.device.peak_nbytes() / 2**30
        return found

    def tell_start(self) -> None:
        """What is about to happen, in a few lines."""
        config, engine = self.config, self.engine
        rows, micro = config.per_device_train_batch_size, config.gradient_accumulation_steps
        self.console.note(
            f"{engine.layout.numel / 1e6:.1f} M parameters, {engine.layout.train_numel / 1e6:.1f} M of them trained, "
            f"on {self.device.kind} in {str(engine.decoder.dtype).removeprefix('torch.')}, {config.window} of "
            f"{len(engine.layout.blocks)} blocks on the device at a time, {config.update_program} updates "
            f"({engine.kernels.isa}, {engine.kernels.threads} threads)"
        )
        self.console.note(
            f"{self.num_steps} steps of {rows} x {micro} = {rows * micro} sequences of up to {config.max_length} tokens"
            f", {self.batches.steps_per_epoch} steps an epoch"
        )
        tiers = "  ".join(f"{tier} {size(nbytes)}" for tier, nbytes in engine.memory().items())
        self.console.note(f"memory: {tiers}")


def _failure(error: LaneFailure, step: Submitted | None) -> RunFailed:
    """The failure of a lane as a sentence with the step and, where the numbers ran away, its rows."""
    if step is None:
        return RunFailed(str(error))
    if isinstance(error.__cause__, NonFinite):
        rows = ", ".join(step.batch.rows)
        return RunFailed(
            f"step {step.number}: {error.__cause__}; its rows: {rows}. Look at these rows, lower learning_rate, or set "
            "on_nonfinite: skip"
        )
    return RunFailed(f"step {step.number}: {error}")


@dataclass(frozen=True, slots=True)
class _Speed:
    loss: float | None  # None when no step had a finite one
    step_s: float
    tokens_per_second: float


class _Interval:
    """Loss and speed between two log lines, and the mean time of the last steps. Evaluations do not count."""

    def __init__(self, sums: LoggedSums | None = None) -> None:
        self._durations: list[float] = []
        self._begin(sums or LoggedSums())
        self.restart()

    def restart(self) -> None:
        """Start the clock of the next step now; what was added stays."""
        self._since = time.perf_counter()

    def _begin(self, sums: LoggedSums) -> None:
        self._loss_sum, self._targets, self._tokens = sums.loss_sum, sums.num_target_tokens, sums.num_input_tokens
        self._steps, self._seconds = sums.num_steps, sums.seconds

    def sums(self) -> LoggedSums:
        """What has been added since the last close."""
        return LoggedSums(
            loss_sum=self._loss_sum,
            num_target_tokens=self._targets,
            num_input_tokens=self._tokens,
            num_steps=self._steps,
            seconds=self._seconds,
        )

    def add(self, loss: float | None, batch: StepBatch) -> None:
        """Count a step that ends now. loss: None when it was not finite."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self._durations = [*self._durations[1 - SPEED_OVER_STEPS :], elapsed]
        if loss is not None:
            self._loss_sum += loss * batch.num_target_tokens
            self._targets += batch.num_target_tokens
        self._tokens += batch.num_input_tokens
        self._steps += 1
        self._seconds += elapsed

    def close(self) -> _Speed:
        """Mean loss per target token, seconds a step, tokens a second since the last close."""
        loss = self._loss_sum / self._targets if self._targets else None
        speed = _Speed(loss, self._seconds / self._steps, self._tokens / self._seconds)
        self._begin(LoggedSums())
        return speed

    def mean_step_s(self) -> float:
        return sum(self._durations) / len(self._durations)
