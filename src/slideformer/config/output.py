"""Settings of what a run writes and tells: checkpoints, results, metrics, evaluations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from slideformer.config.values import NbytesOrZero, Settings

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]


class OutputSettings(Settings):
    """What is written, evaluated and told."""

    output_dir: str = "runs/train"
    save_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: as in the model's config
    save_strategy: Literal["no", "steps", "epoch"] = "no"  # checkpoints; the end result is always saved
    save_steps: int | None = Field(None, ge=1)
    save_in_background: bool = True  # training goes on while a checkpoint is written
    save_memory: NbytesOrZero | None = None  # host memory for copies that wait to be written; null: what is spare
    save_total_limit: int | None = Field(2, ge=1)  # checkpoints that are kept; null: all
    push_to_hub: bool = False  # the result, on the Hugging Face hub; its token is the hub library's business
    hub_model_id: str | None = None  # NAME or ORGANISATION/NAME; null: the name of output_dir
    hub_private_repo: bool = True  # of a repository that is made; one that exists stays as it is
    resume_from_checkpoint: bool | str = False  # a checkpoint's folder; true: the newest; auto: the newest, if any
    run_name: str | None = None  # what trackers call the run; null: the name of output_dir
    report_to: tuple[TrackerName, ...] = ()
    logging_steps: int = Field(1, ge=1)
    verdict_steps: int | None = Field(100, ge=1)  # a sentence about what binds, every so many; null: once
    trace: bool = False  # what every lane does in some steps, as a Chrome trace and as text
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: int | None = Field(None, ge=1)
    eval_on_start: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None  # null: eval_loss, or that of the only evaluation set
    greater_is_better: bool = False
    early_stopping_patience: int | None = Field(None, ge=1)  # evaluations without a better metric; null: never
    early_stopping_threshold: float = Field(0.0, ge=0)  # what counts as better by more than this

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers(cls, value: object) -> object:
        items = value if isinstance(value, (list, tuple)) else [value]
        return [item for item in items if item not in ("none", None, False)]

    @field_validator("metric_for_best_model")
    @classmethod
    def _with_its_prefix(cls, value: str | None) -> str | None:
        return value if value is None or value.startswith("eval_") else f"eval_{value}"
