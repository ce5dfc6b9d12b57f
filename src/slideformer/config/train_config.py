"""All settings of a run in one record: the parts side by side, and defaults that depend on other fields."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import abspath, basename
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from slideformer.config.data import DataSettings
from slideformer.config.disk import DiskSettings
from slideformer.config.faults import WrongSettings, wrong_settings
from slideformer.config.generation import GenerationSettings
from slideformer.config.machine import MachineSettings
from slideformer.config.model import ModelSettings
from slideformer.config.optimizer import DEFAULT_WARMUP_RATIO, WITHOUT_WARMUP, OptimizerSettings, StepSettings
from slideformer.config.output import OutputSettings
from slideformer.config.rules import rules


class TrainConfig(
    GenerationSettings,
    OutputSettings,
    DiskSettings,
    MachineSettings,
    OptimizerSettings,
    StepSettings,
    DataSettings,
    ModelSettings,  # pydantic orders fields from the last of these to the first
):
    """Everything `slideformer train` needs. Sizes are bytes, or text like "24GiB".

    model_name_or_path and dataset may stay empty only where a Trainer is given a model and rows by themselves.
    """

    def __init__(self, **settings: object) -> None:
        """Raises WrongSettings, a BadInput and a ValueError: what was found, what is allowed."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise wrong_settings(error, type(self).model_fields) from None

    @classmethod
    def model_validate(cls, settings: Mapping[str, object]) -> Self:
        """The same for a mapping."""
        for key in settings:
            if not isinstance(key, str):
                raise WrongSettings(f"found the key {key!r}: keys are names, as text", ())
        return cls(**settings)

    def __setattr__(self, name: str, value: object) -> None:
        """Raises WrongSettings: two fields that belong together would not be looked at together."""
        raise WrongSettings(
            f"{name} cannot be set: a config stays as it was made, so give {name} to TrainConfig", (name,)
        )

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend(cls, values: dict[str, object]) -> dict[str, object]:
        """Defaults that depend on what else was given; `values` itself is left alone."""
        filled = dict(values)
        if filled.get("warmup_ratio") is None and filled.get("warmup_steps") is None:
            cold = filled.get("lr_scheduler_type") in WITHOUT_WARMUP
            filled["warmup_ratio"] = 0.0 if cold else DEFAULT_WARMUP_RATIO
        if "eval_strategy" not in filled and (filled.get("eval_dataset") or filled.get("val_size")):
            filled["eval_strategy"] = "steps" if filled.get("eval_steps") else "epoch"
        if "save_strategy" not in filled and filled.get("save_steps"):
            filled["save_strategy"] = "steps"
        if filled.get("metric_for_best_model") is None:
            sets = filled.get("eval_dataset")
            name = next(iter(sets)) if isinstance(sets, dict) and len(sets) == 1 and "path" not in sets else ""
            filled["metric_for_best_model"] = f"eval_{name}_loss" if name else "eval_loss"
        if filled.get("data_seed") is None:
            filled["data_seed"] = filled.get("seed", cls.model_fields["seed"].default)
        return filled

    @model_validator(mode="after")
    def _rules_between_fields(self) -> Self:
        for broken, sentence in rules(self):
            if broken:
                raise ValueError(sentence)
        return self

    @property
    def update_program(self) -> Literal["eager", "deferred"]:
        if self.update != "auto":
            return self.update
        return "deferred" if self.max_grad_norm > 0 or self.on_nonfinite == "skip" else "eager"

    @property
    def repo_id(self) -> str:
        """What push_to_hub pushes to."""
        return self.hub_model_id or basename(abspath(self.output_dir))

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def rows_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps
