"""Settings of the steps, of the learning rate and of the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from slideformer.config.values import Settings, as_number

DEFAULT_WARMUP_RATIO = 0.03
Schedule = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "reduce_lr_on_plateau",
    "greedy",
]
FOLLOWS_A_METRIC = ("reduce_lr_on_plateau", "greedy")  # rates that depend on what the evaluations gave
WITHOUT_WARMUP = ("constant", *FOLLOWS_A_METRIC)
WITH_A_FLOOR = ("cosine", "linear")


class StepSettings(Settings):
    """What a step takes of the data, and how many there are."""

    per_device_train_batch_size: int = Field(1, ge=1)
    auto_find_batch_size: bool = False  # what has no room goes in parts; a step has as many rows
    per_device_eval_batch_size: int = Field(0, ge=0)  # 0: as in training
    gradient_accumulation_steps: int = Field(1, ge=1)
    num_train_epochs: float = Field(1.0, gt=0)
    max_steps: int = Field(-1, ge=-1)  # -1, 0, null: no limit, num_train_epochs decides
    seed: int = Field(42, ge=0)
    data_seed: int | None = Field(None, ge=0)
    full_determinism: bool = False  # on a GPU the same bits twice, by kernels that may be slower

    @field_validator("max_steps")
    @classmethod
    def _zero_is_no_limit(cls, value: int) -> int:
        return value or -1


class OptimizerSettings(Settings):
    """How weights change."""

    learning_rate: float = Field(1e-5, ge=0)
    lr_scheduler_type: Schedule = "cosine"
    lr_scheduler_kwargs: dict[str, int | float | str | bool | None] = {}  # of transformers' schedule of that name
    min_lr_ratio: float = Field(0.0, ge=0, le=1)  # of cosine and linear
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    warmup_steps: float | None = Field(None, ge=0)  # a share of all steps below 1
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, ge=0)  # 0: off
    on_nonfinite: Literal["stop", "skip"] = "stop"
    update: Literal["auto", "eager", "deferred"] = "auto"

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        """YAML reads 1e-7 as text."""
        if not isinstance(value, dict):
            return value
        return {k: n if isinstance(v, str) and (n := as_number(v)) is not None else v for k, v in value.items()}
