"""Loss and speed between two log lines, and the mean time of the last steps. Evaluations do not count."""

from __future__ import annotations

import time
from dataclasses import dataclass

from slideformer.data.batches import StepBatch
from slideformer.train.checkpoint import LoggedSums

SPEED_OVER_STEPS = 20  # the time left is judged by the mean of so many steps


@dataclass(frozen=True, slots=True)
class Speed:
    """Of the steps since the last log line."""

    loss: float | None  # None when no step had a finite one
    step_s: float
    tokens_per_second: float


class Interval:
    """Adds up steps from one log line to the next."""

    def __init__(self, sums: LoggedSums | None = None) -> None:
        """sums: what the next line already counts, when a run goes on from between two lines."""
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

    def close(self) -> Speed:
        """Mean loss per target token, seconds a step, tokens a second since the last close."""
        loss = self._loss_sum / self._targets if self._targets else None
        speed = Speed(loss, self._seconds / self._steps, self._tokens / self._seconds)
        self._begin(LoggedSums())
        return speed

    def mean_step_s(self) -> float:
        return sum(self._durations) / len(self._durations)
