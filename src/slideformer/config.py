"""One frozen, validated record of a run, and every rule between its fields.

Names are those of Hugging Face TrainingArguments and TRL. Reading files and command lines, and what other tools call
these fields, is the command line's business. Standard library and pydantic only.
"""

from __future__ import annotations

import re
from os.path import abspath, basename
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from slideformer.dataset_settings import DatasetSpec, as_named_specs, as_specs, data_rules

SIZE_UNITS = {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MIN_SIZE_NBYTES = 2**20  # a bare number below this was meant as GiB: ask, do not guess
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
TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]
NULL_MEANS = {
    "max_steps": -1,
    "max_grad_norm": 0.0,
    "val_size": 0,
    "per_device_eval_batch_size": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
    "resume_from_checkpoint": False,
    "lr_scheduler_kwargs": {},
    "chat_template_kwargs": {},
}


class TrainConfig(BaseModel):
    """Everything `slideformer train` needs. Sizes are bytes, or text like "24GiB".

    model_name_or_path and dataset may stay empty only where a Trainer is given a model and rows by themselves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # Model
    model_name_or_path: str = ""
    attn_implementation: Literal["auto", "eager", "sdpa"] = "auto"
    disable_dropout: bool = False
    kernels: Literal["auto", "triton", "torch", "liger"] = "auto"  # of the blocks' elementwise parts
    allow_pickle: bool = False  # read pytorch_model.bin where there is no safetensors file
    freeze: tuple[str, ...] = ()  # regular expressions searched in parameter names

    # Data
    dataset: tuple[DatasetSpec, ...] = ()
    dataset_text_field: str = "text"
    eval_dataset: dict[str, DatasetSpec] = {}  # by name; the metric is eval_NAME_loss, eval_loss for the name ""
    val_size: float = Field(0, ge=0)  # rows taken from the training rows; a share of them below 1
    max_length: int = Field(2048, ge=2)
    excess_length_strategy: Literal["drop", "truncate", "raise"] = "truncate"
    assistant_only_loss: bool = True
    completion_only_loss: bool = True
    packing: bool = False  # several samples a row, none of which sees another
    chat_template: str | None = None  # a jinja file; null: the tokenizer's own
    chat_template_kwargs: dict[str, JsonValue] = {}  # further variables of the template: {enable_thinking: false}
    max_samples: int | None = Field(None, ge=1)  # rows that are read of each dataset
    streaming: bool = False  # rows are read and encoded as they are needed; needs max_steps
    shuffle_buffer_size: int = Field(1000, ge=1)  # samples that are shuffled, and packed, at a time when streaming
    dataset_num_proc: int | None = Field(None, ge=1)  # processes that encode rows; null: this one
    dataset_cache_dir: str | None = "auto"  # encoded rows are kept there; auto: ~/.cache/slideformer; null: nowhere
    strict: bool = False  # a row that cannot be used is an error, instead of counted and left out

    # Steps
    per_device_train_batch_size: int = Field(1, ge=1)
    per_device_eval_batch_size: int = Field(0, ge=0)  # 0: as in training
    gradient_accumulation_steps: int = Field(1, ge=1)
    num_train_epochs: float = Field(1.0, gt=0)
    max_steps: int = Field(-1, ge=-1)  # -1: by num_train_epochs
    seed: int = Field(42, ge=0)
    data_seed: int | None = Field(None, ge=0)

    # Optimizer
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

    # Machine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    bf16: Literal["auto"] | bool = "auto"  # auto: on a GPU yes, on a CPU no (fp32 is faster there on most of them)
    window: int = Field(2, ge=1)  # blocks on the device at a time
    tile_numel: int = Field(16 * 2**20, ge=1)  # elements of one transfer and update; 32 MiB as bf16
    grad_slots: int = Field(2, ge=1)
    ring: int = Field(4, ge=2)  # staging buffers of one tile
    offload_activations: Literal["auto", "cpu", "none"] = "auto"  # auto: what the device has no room for
    update_ahead: Literal["auto", "none"] = "auto"  # second copies of some state, where clipping would cost time
    placement: Literal["auto", "stream", "resident"] = "auto"  # auto: on a GPU what has room there and is fastest
    max_gpu_memory: int | None = Field(None, ge=1)
    max_host_memory: int | None = Field(None, ge=1)
    ignore_memory_limits: bool = False  # warn instead of ending where a limit will be exceeded
    cpu_threads: int | None = Field(None, ge=1)

    # Output
    output_dir: str = "runs/train"
    save_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: as in the model's config
    save_strategy: Literal["no", "steps", "epoch"] = "no"  # checkpoints; the end result is always saved
    save_steps: int | None = Field(None, ge=1)
    save_in_background: bool = True  # training goes on while a checkpoint is written
    save_total_limit: int | None = Field(2, ge=1)  # checkpoints that are kept; null: all
    push_to_hub: bool = False  # the result, on the Hugging Face hub; its token is the hub library's business
    hub_model_id: str | None = None  # NAME or ORGANISATION/NAME; null: the name of output_dir
    hub_private_repo: bool = True  # of a repository that is made; one that exists stays as it is
    resume_from_checkpoint: bool | str = False  # a checkpoint's folder; true: the newest; auto: the newest, if any
    run_name: str | None = None  # what trackers call the run; null: the name of output_dir
    report_to: tuple[TrackerName, ...] = ()
    logging_steps: int = Field(1, ge=1)
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: int | None = Field(None, ge=1)
    eval_on_start: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None  # null: eval_loss, or that of the only evaluation set
    greater_is_better: bool = False
    early_stopping_patience: int | None = Field(None, ge=1)  # evaluations without a better metric; null: never
    early_stopping_threshold: float = Field(0.0, ge=0)  # what counts as better by more than this

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: object, info: ValidationInfo) -> object:
        """What YAML and command lines make of numbers and words: `no` for "no", "1e3" for 1000, yes for 1."""
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        if isinstance(value, str) and "\0" in value:
            raise ValueError("found text with a NUL byte in it, which no path and no name can have")
        if isinstance(value, bool) and not {bool, True, False} & kinds:
            if value is False and "no" in kinds:
                return "no"
            raise ValueError(f"found {'yes' if value else 'no'}, which is not a value of {info.field_name}")
        if value is None and info.field_name in NULL_MEANS:
            return NULL_MEANS[info.field_name]
        if int in kinds and isinstance(value, str):
            number = _number(value)
            return int(number) if number is not None and number.is_integer() else value
        return value

    @field_validator("max_steps")
    @classmethod
    def _zero_is_no_limit(cls, value: int) -> int:
        return value or -1

    @field_validator("dataset", mode="before")
    @classmethod
    def _one_dataset(cls, value: object) -> object:
        return as_specs(value)

    @field_validator("eval_dataset", mode="before")
    @classmethod
    def _one_eval_dataset(cls, value: object) -> object:
        return as_named_specs(value)

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers(cls, value: object) -> object:
        items = value if isinstance(value, (list, tuple)) else [value]
        return [item for item in items if item not in ("none", None, False)]

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        """YAML reads 1e-7 as text."""
        if not isinstance(value, dict):
            return value
        return {k: n if isinstance(v, str) and (n := _number(v)) is not None else v for k, v in value.items()}

    @field_validator("metric_for_best_model")
    @classmethod
    def _with_its_prefix(cls, value: str | None) -> str | None:
        return value if value is None or value.startswith("eval_") else f"eval_{value}"

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_pattern(cls, value: object) -> object:
        return [value] if isinstance(value, str) else [] if value is None else value

    @field_validator("freeze")
    @classmethod
    def _patterns_compile(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value

    @field_validator("max_gpu_memory", "max_host_memory", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= MIN_SIZE_NBYTES):
            return value
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?B)\s*", str(value), re.IGNORECASE)
        number = _number(match[1]) if match else None
        if match is None or number is None:
            raise ValueError(f"found {value!r}, which is no size: write 24GiB (or MiB, GB, MB)")
        return int(number * SIZE_UNITS[match[2].upper()])

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
        for broken, sentence in self._rules():
            if broken:
                raise ValueError(sentence)
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        """Every rule between fields, as (is it broken, what to say)."""
        in_python = not self.dataset  # rows, and more of them to evaluate on, are given beside the config
        has_eval = bool(self.eval_dataset) or self.val_size > 0 or in_python
        return [
            *data_rules(
                streaming=self.streaming,
                max_steps=self.max_steps,
                val_size=self.val_size,
                has_eval_dataset=bool(self.eval_dataset),
                eval_strategy=self.eval_strategy,
                save_strategy=self.save_strategy,
            ),
            *self._rules_of_moments(has_eval),
            *self._rules_of_the_schedule(),
            *self._rules_of_the_best(),
            (
                self.update == "eager" and self.max_grad_norm > 0,
                "update: eager cannot clip (it updates before the norm is known), and "
                + f"max_grad_norm is {self.max_grad_norm:g}: set max_grad_norm: 0, or update: deferred",
            ),
            (
                self.update == "eager" and self.on_nonfinite == "skip",
                "on_nonfinite: skip needs update: deferred, because an eager update cannot be taken back",
            ),
            (
                self.warmup_ratio is not None and self.warmup_steps is not None,
                "warmup_ratio and warmup_steps are both given: keep one",
            ),
            (
                bool(self.model_name_or_path) and abspath(self.output_dir) == abspath(self.model_name_or_path),
                f"output_dir is the model's own folder, {self.output_dir}, which it would overwrite: choose another",
            ),
        ]

    def _rules_of_moments(self, has_eval: bool) -> list[tuple[bool, str]]:
        """When there are evaluations and checkpoints."""
        return [
            (
                self.eval_strategy != "no" and not has_eval,
                f"eval_strategy is {self.eval_strategy}, but there is nothing to evaluate: "
                + "give eval_dataset or val_size",
            ),
            (
                self.eval_on_start and not has_eval,
                "eval_on_start is true, but there is nothing to evaluate: give eval_dataset or val_size",
            ),
            (
                self.eval_strategy == "steps" and self.eval_steps is None,
                "eval_strategy is steps, but eval_steps is not given: say after how many steps",
            ),
            (
                self.eval_steps is not None and self.eval_strategy != "steps",
                f"eval_steps is given, but eval_strategy is {self.eval_strategy}: set eval_strategy: steps",
            ),
            (
                self.save_strategy == "steps" and self.save_steps is None,
                "save_strategy is steps, but save_steps is not given: say after how many steps",
            ),
            (
                self.save_steps is not None and self.save_strategy != "steps",
                f"save_steps is given, but save_strategy is {self.save_strategy}: set save_strategy: steps",
            ),
            (
                self.resume_from_checkpoint == "",
                "resume_from_checkpoint is empty: give a checkpoint's folder, true or auto",
            ),
        ]

    def _rules_of_the_schedule(self) -> list[tuple[bool, str]]:
        name = self.lr_scheduler_type
        cold = name in WITHOUT_WARMUP
        instead = "use constant_with_warmup, or drop the warm-up" if name == "constant" else "drop the warm-up"
        return [
            (
                cold and bool(self.warmup_ratio or self.warmup_steps),
                f"lr_scheduler_type: {name} has no warm-up: {instead}",
            ),
            (
                name not in WITH_A_FLOOR and self.min_lr_ratio > 0,
                f"min_lr_ratio has no meaning with lr_scheduler_type: {name}: drop it"
                + ("" if name.startswith("constant") else ", or say it in lr_scheduler_kwargs"),
            ),
            (
                name in FOLLOWS_A_METRIC and self.eval_strategy == "no",
                f"lr_scheduler_type: {name} follows {self.metric_for_best_model}, but nothing is evaluated: give "
                + "eval_dataset or val_size",
            ),
        ]

    def _rules_of_the_best(self) -> list[tuple[bool, str]]:
        """When checkpoints are compared."""
        judges = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
        asked = self.load_best_model_at_end or self.early_stopping_patience is not None
        each = self.eval_steps if self.eval_strategy == "steps" else None
        return [
            (
                asked and self.eval_strategy == "no",
                f"{judges} needs evaluations, but eval_strategy is no: give eval_dataset or val_size",
            ),
            (
                self.load_best_model_at_end
                and (self.save_strategy != self.eval_strategy or bool(each and (self.save_steps or 0) % each)),
                "load_best_model_at_end needs a checkpoint at evaluations: set save_strategy as eval_strategy, and "
                + "save_steps to eval_steps or a multiple of it",
            ),
        ]

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


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _kinds(annotation: object) -> set[object]:
    """The leaf types and literal values of an annotation: {bool, "auto"} for `Literal["auto"] | bool`."""
    inner = get_args(annotation)
    return set().union(*(_kinds(a) for a in inner)) if inner else {annotation}
