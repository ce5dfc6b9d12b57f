"""The loop: every step, and the log lines, evaluations and checkpoints between them.

Step k+1 is submitted before the result of step k is read, so the lanes never drain between steps, except where
something has to be known first: before an evaluation, a checkpoint and the end.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from slideformer.config import TrainConfig
from slideformer.data import Batches
from slideformer.data.batches import StepBatch
from slideformer.device import Device, LaneFailure
from slideformer.engine import Engine, NonFinite, StepResult
from slideformer.errors import RunFailed
from slideformer.layout import Layout
from slideformer.train.best import Judge
from slideformer.train.callbacks import Callbacks
from slideformer.train.checkpoint import Progress, folder_name
from slideformer.train.disk_use import DiskUse
from slideformer.train.evaluation import Sets, evaluate
from slideformer.train.interval import Interval
from slideformer.train.journal import Journal
from slideformer.train.panel import duration
from slideformer.train.samples import Samples
from slideformer.train.saver import Saver
from slideformer.train.schedule import Schedule
from slideformer.train.stop import Stopped, StopRequests
from slideformer.train.timeline import AFTER_STEPS, TRACED_STEPS, Tracer, write_timeline
from slideformer.train.verdict import verdict

LONG_S = 1800.0
"""A run that takes longer and writes no checkpoints is told what a kill would cost it."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A step whose result has not been read yet."""

    number: int  # from 1
    batch: StepBatch
    learning_rate: float
    result: StepResult


@dataclass(frozen=True, slots=True)
class Work:
    """What a run is done with and on. num_steps: of the whole run. peak_tflops: of the device, where one is known."""

    config: TrainConfig
    engine: Engine
    device: Device
    batches: Batches
    evaluation: Sets
    schedule: Schedule
    num_steps: int
    samples: Samples
    peak_tflops: float | None


class Loop:
    """One run of the loop. All that is not arithmetic is asked of `work`, told to `journal`, or left to `saver`."""

    def __init__(
        self,
        work: Work,
        journal: Journal,
        judge: Judge,
        saver: Saver | None,
        stop: StopRequests,
        start: Progress,
    ) -> None:
        """start: how far the run is already; judge has its evaluations."""
        self.work, self.journal, self.judge, self.saver, self.stop = work, journal, judge, saver, stop
        self.callbacks: Callbacks = journal.callbacks
        self._start, self._saved_step = start, start.step
        self._saves = False  # a checkpoint is being written, or has been and callbacks have not heard of it
        self._interval = Interval(start.logged)
        self._flops_per_token = flops_per_token(work.engine.layout)
        self._tokens_seen, self._targets_seen = start.num_input_tokens_seen, start.num_target_tokens_seen
        self._nonfinite_steps = start.nonfinite_steps
        # The first is replaced by a later one, unless the run is a short one.
        self._drawn = {start.step + 1, min(start.step + 1 + AFTER_STEPS, work.num_steps)}
        self._tracer = _tracer(work, start.step)
        self._say_what_binds, self._may_lose_all = False, saver is None
        self._disk = DiskUse(work.engine, work.config.max_disk_writes, before=start.disk_writes)
        self.loss_sum, self.num_losses = 0.0, 0  # of the steps of this process, for the mean

    def run(self) -> None:
        """From where it starts to the last step, or to where a callback or the judge ends it."""
        config, first = self.work.config, self._start.step
        self.callbacks.fire("on_train_begin")
        if self.judge.exhausted:  # a run that had ended early goes on no further
            self.callbacks.control.should_training_stop = True
        if config.eval_on_start if first == 0 else not self._start.evaluated:
            self._evaluate(first, self.work.batches.step(first - 1).epoch if first else 0.0)
        self._interval.restart()
        waiting: Submitted | None = None
        if self._disk.is_spent:  # by loading the model
            self._stop_for_the_disk(first)
        for index in range(first, self.work.num_steps):
            if self._ends(index):
                break
            submitted = self._submit(index, waiting)
            if waiting is not None:
                self._finish(waiting)
            waiting = submitted
            spent = self._disk.is_spent  # once: lanes go on writing
            saves, evaluates = self._saves_after(index, spent=spent), self._evaluates_after(index)
            if saves or evaluates or self._samples_after(index + 1) or self._ends(index + 1) or spent:
                self._finish(waiting)
                waiting = None
                self._between(index + 1, submitted.batch.epoch, saves=saves, evaluates=evaluates)
            if self.saver is None or self._saved_step == index + 1:  # else a signal has come since, and waits a step
                self.stop_if_asked(f"after step {index + 1} of {self.work.num_steps}", index + 1)
            if spent:
                self._stop_for_the_disk(index + 1)
        self._settle_save()
        self.callbacks.fire("on_train_end")

    def _between(self, step: int, epoch: float, *, saves: bool, evaluates: bool) -> None:
        """What comes after a step whose result has been read. The last one has an evaluation, if any, and a save."""
        if evaluates or (self._ends(step) and self.work.config.eval_strategy != "no"):
            self._evaluate(step, epoch)
        if self._samples_after(step):
            self._sample(step, epoch)
        if saves or self._ends(step):
            self._save(step, evaluated=True)
        self._interval.restart()

    def _ends(self, step: int) -> bool:
        """Whether the run is over after `step` steps."""
        return step >= self.work.num_steps or self.callbacks.control.should_training_stop

    def _sample(self, step: int, epoch: float) -> None:
        """What the model writes now. A signal ends it after the pass in hand, with a checkpoint if there are any."""
        where = f"in the samples after step {step}"
        try:
            self.journal.samples(self.work.samples.take(step, epoch, lambda: self.stop.raise_if_asked(where)))
        except Stopped as stopped:
            if not stopped.at_once:
                self._save(step, evaluated=True)
                self.stop_if_asked(where, step)
            raise

    def _samples_after(self, step: int) -> bool:
        return self.work.samples.due(step, last=self._ends(step))

    def _saves_after(self, index: int, *, spent: bool) -> bool:
        """Whether a checkpoint is due after step `index`, from 0, or has been asked for. spent: the run stops there."""
        number, asked = index + 1, self.stop.take_save()
        wanted = self.callbacks.take("save")
        if self.saver is None:
            who = "SIGUSR1" if asked else "a callback" if wanted else None
            if who is not None:
                self.journal.console.warn(f"{who} asks for a checkpoint, but save_strategy is no: nothing is saved")
            return False
        every = self.work.config.save_steps or self.work.batches.steps_per_epoch
        return asked or wanted or self.stop.asked or spent or number % every == 0 or number == self.work.num_steps

    def _save(self, step: int, *, evaluated: bool) -> None:
        """Write the checkpoint of a step whose result has been read, unless the run started with it."""
        if self.saver is None or self._saved_step == step:
            return
        self.journal.file.flush()
        if evaluated:
            self.judge.saved(step)
        progress = Progress(
            step=step,
            num_updates=self.work.engine.num_updates,
            evaluated=evaluated,
            num_input_tokens_seen=self._tokens_seen,
            num_target_tokens_seen=self._targets_seen,
            nonfinite_steps=self._nonfinite_steps,
            logged=self._interval.sums(),
            judged=tuple(self.judge.judged),
            best_saved=self.judge.best_saved,
            callbacks=self.callbacks.kept(),
            disk_writes=self._disk.written,
        )
        self._settle_save()
        self.saver.save(progress)
        self._saved_step, self._saves = step, True
        if self.judge.best_saved is not None:
            self.callbacks.state.best_model_checkpoint = (
                f"{self.work.config.output_dir}/{folder_name(self.judge.best_saved)}"
            )
        if self.saver.is_done:
            self._settle_save()

    def _settle_save(self) -> None:
        """Wait until the checkpoint that is being written is complete. Callbacks hear of it then."""
        if self.saver is not None and self._saves:
            self.saver.wait()
            self._saves = False
            self.callbacks.fire("on_save")

    def stop_if_asked(self, where: str, step: int) -> None:
        """Raise Stopped if a signal has come. where, step: how far the run is."""
        saved = self.saver is not None and step > 0 and self._saved_step == step
        if self.stop.asked:
            self._settle_save()
        what = f"go on from checkpoint-{step} with resume_from_checkpoint: auto" if saved else "nothing was saved"
        self.stop.raise_if_asked(f"{where}: {what}")

    def _stop_for_the_disk(self, step: int) -> None:
        """Raise RunFailed, unless this was the last step."""
        if self._ends(step):
            return
        self._settle_save()
        saved = self.saver is not None and self._saved_step == step and step > 0
        on = f"go on from checkpoint-{step} with resume_from_checkpoint: auto and"
        what = on if saved else "nothing was saved; set"
        raise RunFailed(f"after step {step} of {self.work.num_steps}: {self._disk.sentence()}; {what} a larger limit")

    def _submit(self, index: int, waiting: Submitted | None) -> Submitted:
        if index % self.work.batches.steps_per_epoch == 0:
            self.callbacks.fire("on_epoch_begin")
        self.callbacks.fire("on_step_begin")
        batch = self.work.batches.step(index)
        rate = self.work.schedule.rate(index)
        try:
            return Submitted(index + 1, batch, rate, self.work.engine.step(batch.micro_batches, lr=rate))
        except LaneFailure as error:
            raise _failure(error, waiting) from error

    def _finish(self, step: Submitted) -> None:
        """Wait for a step's result, tell of it, and log it if it is due."""
        try:
            loss, norm, nonfinite = step.result.loss, step.result.grad_norm, step.result.nonfinite
        except LaneFailure as error:
            raise _failure(error, step) from error
        self._tokens_seen += step.batch.num_input_tokens
        self._targets_seen += step.batch.num_target_tokens
        self._nonfinite_steps += nonfinite
        self._interval.add(None if nonfinite else loss, step.batch)
        if not nonfinite:
            self.loss_sum, self.num_losses = self.loss_sum + loss, self.num_losses + 1
        state = self.callbacks.state
        state.global_step, state.epoch, state.num_input_tokens_seen = step.number, step.batch.epoch, self._tokens_seen
        self.callbacks.fire("on_step_end")
        if self.saver is not None and self.saver.is_done:
            self._settle_save()
        if step.number % self.work.batches.steps_per_epoch == 0:
            self.callbacks.fire("on_epoch_end")
        if step.number in self._drawn:
            write_timeline(Path(self.work.config.output_dir), step.number, step.result.timeline())
            self._say_what_binds = step.number > self._start.step + 1
        if every := self.work.config.verdict_steps:
            self._say_what_binds |= step.number % every == 0
        if self._tracer is not None and self._tracer.wants(step.number):
            self._tracer.add(step.number, step.result.timeline())
        due = step.number % self.work.config.logging_steps == 0 or step.number == self.work.num_steps
        if self.callbacks.take("log") or due:
            self.journal.step(self._metrics(step, None if nonfinite else norm), self.work.num_steps)

    def _metrics(self, step: Submitted, norm: float | None) -> dict[str, float | int | None]:
        speed = self._interval.close()
        tflops, peak = self._flops_per_token * speed.tokens_per_second / 1e12, self.work.peak_tflops
        left_s = self._interval.mean_step_s() * (self.work.num_steps - step.number)
        if self._say_what_binds:
            busy = {str(lane): min(s / speed.step_s, 1.0) for lane, s in step.result.busy_s().items()}
            engine = self.work.engine
            promised = (engine.predicted_step_s, engine.predicted_clipped_s)
            self.journal.console.note(verdict(busy, speed.step_s, *promised))
            self._say_what_binds = False
            if self._may_lose_all and left_s > LONG_S:
                self.journal.console.note(
                    f"about {duration(left_s)} to go without checkpoints: stopped or killed, this run would start "
                    "anew. To go on from the last one, set save_steps and resume_from_checkpoint: auto"
                )
            self._may_lose_all = False
        return {
            "global_step": step.number,
            "epoch": round(step.batch.epoch, 4),
            "loss": speed.loss,
            "grad_norm": norm,
            "learning_rate": step.learning_rate,
            "num_input_tokens_seen": self._tokens_seen,
            "num_target_tokens_seen": self._targets_seen,
            "tokens_per_second": speed.tokens_per_second,
            "step_time": speed.step_s,
            "tflops": tflops,
            **({} if peak is None else {"mfu": tflops / peak}),
            "eta_seconds": left_s,
            "nonfinite_steps": self._nonfinite_steps,
            **_memory_metrics(self.work.device),
            **self._disk.metrics(),
            **{f"busy_{lane}_pct": min(100 * s / speed.step_s, 100.0) for lane, s in step.result.busy_s().items()},
        }

    def _evaluates_after(self, index: int) -> bool:
        """Whether an evaluation is due after step `index`, from 0, or has been asked for."""
        number, asked = index + 1, self.callbacks.take("evaluate")
        if self.work.config.eval_strategy == "no":
            return asked and bool(self.work.evaluation)
        every = self.work.config.eval_steps or self.work.batches.steps_per_epoch
        return asked or number % every == 0 or number == self.work.num_steps

    def _evaluate(self, step: int, epoch: float) -> None:
        """The loss of every evaluation set, and what follows from it."""

        def stop_if_asked() -> None:
            if self.stop.asked:
                self._save(step, evaluated=False)
                self.stop_if_asked(f"in the evaluation after step {step}", step)

        found = evaluate(self.work.engine, self.work.evaluation, between=stop_if_asked)
        metrics = {"global_step": step, "epoch": round(epoch, 4), **found}
        self.journal.evaluation(metrics)
        self.callbacks.fire("on_evaluate", metrics=dict(metrics))
        value = self.judge.add(step, metrics) if step else None  # the model as it came is no result of the run
        if value is not None:
            self.work.schedule.observe(value)
        if self.judge.best is not None:
            state = self.callbacks.state
            state.best_global_step, state.best_metric = self.judge.best
        if self.judge.exhausted and not self.callbacks.control.should_training_stop:
            self.callbacks.control.should_training_stop = True
            self.journal.console.note(
                f"stopped early: {self.judge.rule.metric} has not been better for {self.judge.rule.patience} "
                "evaluations (early_stopping_patience)"
            )


def flops_per_token(layout: Layout) -> float:
    """Of a training step: 2 a multiply-add of every product with a weight matrix, times 3 for backward.

    What is run again in backward counts once, the products of attention itself do not count.
    """
    matrices = [p for unit in layout.blocks for p in layout.units[unit].params if len(p.shape) > 1]
    head = max(layout.units[layout.output].params, key=lambda p: p.numel)
    return 6.0 * (sum(p.numel for p in matrices) + head.numel)


def _memory_metrics(device: Device) -> dict[str, float]:
    found = {
        "host_mem_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "pinned_gib": device.page_locked_nbytes / 2**30,
    }
    if device.kind == "cuda":
        found["gpu_mem_peak_gib"] = device.peak_nbytes() / 2**30
    return found


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


def _tracer(work: Work, done: int) -> Tracer | None:
    """Of the first ordinary steps of a process, where the config asks for a trace. done: steps before it."""
    if not work.config.trace:
        return None
    first = min(done + 1 + AFTER_STEPS, work.num_steps)
    return Tracer(Path(work.config.output_dir), first, min(first + TRACED_STEPS - 1, work.num_steps))
