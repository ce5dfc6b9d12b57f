"""How many steps a run has, and the learning rate of each: transformers' own schedules, asked by step.

A rate is a function of the step, and for the schedules that follow a metric of the evaluations so far as well: so a run
that goes on needs nothing of a schedule's state but these.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from transformers.optimization import get_scheduler

from slideformer.config import FOLLOWS_A_METRIC, WITH_A_FLOOR, TrainConfig
from slideformer.errors import BadInput


class _Steps(Protocol):
    def num_steps(self, *, epochs: float, max_steps: int) -> int: ...


def num_steps(config: TrainConfig, batches: _Steps) -> int:
    """Steps of the whole run, from its beginning."""
    return batches.num_steps(epochs=config.num_train_epochs, max_steps=config.max_steps)


class Schedule:
    """The rates of a run of `num_steps` steps."""

    def __init__(self, config: TrainConfig, num_steps: int) -> None:
        """Raises BadInput for lr_scheduler_kwargs that transformers' schedule of that name does not take."""
        self._base, self._floor = config.learning_rate, config.min_lr_ratio
        self._has_floor = config.lr_scheduler_type in WITH_A_FLOOR
        self._warmup = num_warmup_steps(config, num_steps)
        # A schedule of transformers is bound to an optimizer. This one only carries the rate.
        self._carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
        self._follows = config.lr_scheduler_type in FOLLOWS_A_METRIC
        given = dict(config.lr_scheduler_kwargs)
        try:
            self._theirs = get_scheduler(
                config.lr_scheduler_type,
                self._carrier,
                num_warmup_steps=self._warmup,
                num_training_steps=num_steps,
                scheduler_specific_kwargs=given,
            )
            self.rate(max(num_steps - 1, 0))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            reason = str(error).replace("() missing", " is missing").partition("() got an")
            text = f"it got an{reason[2]}" if reason[1] else reason[0]
            raise BadInput(
                f"lr_scheduler_type: {config.lr_scheduler_type} cannot be used with lr_scheduler_kwargs: {given} over "
                f"{num_steps} steps: {text}"
            ) from None

    def warnings(self, num_steps: int) -> list[str]:
        """What is allowed but hardly ever meant."""
        if num_steps == 1 and self._base and not self.rate(0):
            return ["the only step is warmup's first, at a learning rate of 0: nothing is learned; set warmup_ratio: 0"]
        return []

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0. With warm-up the first step's is 0, as in transformers."""
        if self._follows:
            return float(self._carrier.param_groups[0]["lr"])
        share = float(self._theirs.lr_lambdas[0](step))
        if self._has_floor and step >= self._warmup:
            share = self._floor + (1.0 - self._floor) * share
        return self._base * share

    def observe(self, metric: float) -> None:
        """Take note of an evaluation, in the order in which they were made."""
        if self._follows:
            self._theirs.step(metric)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """The rate of one step, from 0, before any evaluation."""
    return Schedule(config, num_steps).rate(step)


def num_warmup_steps(config: TrainConfig, num_steps: int) -> int:
    """warmup_steps, where a number below 1 is a share; else the share warmup_ratio. Shares are rounded up."""
    given = config.warmup_steps
    if given is not None and (given >= 1 or given == 0):
        return math.ceil(given)
    return math.ceil((given if given is not None else config.warmup_ratio or 0.0) * num_steps)
