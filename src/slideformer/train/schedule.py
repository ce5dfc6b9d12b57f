"""How many steps a run has, and their rates: closed forms of the step, as transformers' schedules of these names."""

from __future__ import annotations

import math

from slideformer.config import TrainConfig
from slideformer.data import Batches


def num_steps(config: TrainConfig, batches: Batches) -> int:
    """Steps of the whole run, from its beginning."""
    return batches.num_steps(epochs=config.num_train_epochs, max_steps=config.max_steps)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """The rate of step `step`, from 0. With warm-up the first step's is 0, as in transformers."""
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return config.learning_rate * step / max(1, warmup)
    if config.lr_scheduler_type.startswith("constant"):
        return config.learning_rate
    progress = (step - warmup) / max(1, num_steps - warmup)
    if config.lr_scheduler_type == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    low = config.min_lr_ratio
    return config.learning_rate * (low + (1.0 - low) * max(0.0, share))


def num_warmup_steps(config: TrainConfig, num_steps: int) -> int:
    """warmup_steps, where a number below 1 is a share; else the share warmup_ratio. Shares are rounded up."""
    given = config.warmup_steps
    if given is not None and (given >= 1 or given == 0):
        return math.ceil(given)
    return math.ceil((given if given is not None else config.warmup_ratio or 0.0) * num_steps)
