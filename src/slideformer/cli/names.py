"""From settings as users write them to a TrainConfig: other tools' spellings, unknown keys, and places."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import Repr

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from slideformer.config import DatasetSpec, DiskSettings, GenerationSettings, TrainConfig
from slideformer.errors import BadInput


@dataclass(frozen=True, slots=True)
class Setting:
    """One `key: value` as the user wrote it. where: "train.yaml:7" or "command line"."""

    key: str
    value: object
    where: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, and one line for each thing about its spelling that the user should hear."""

    config: TrainConfig
    notices: tuple[str, ...]


def _dtype_as_bf16(value: object) -> object:
    return {"auto": "auto", "bfloat16": True, "bf16": True, "float32": False, "fp32": False}.get(str(value), value)


def _not(value: object) -> object:
    return not value if isinstance(value, bool) else value


def _nvme(value: object) -> object:
    """ac_offload_nvme: true is nvme; false asks for nothing in particular. A number is a share."""
    return {True: "nvme", False: "auto"}[value] if isinstance(value, bool) else value


def _liger_as_kernels(value: object) -> object:
    """use_liger_kernel: true asks for that package; false asks for nothing in particular."""
    return {True: "liger", False: "auto"}[value] if isinstance(value, bool) else value


ALIASES: dict[str, str] = {
    "base_model": "model_name_or_path",
    "model": "model_name_or_path",
    "model_path": "model_name_or_path",
    "dataset_name": "dataset",
    "datasets": "dataset",
    "local_dataset": "dataset",
    "text_column": "dataset_text_field",
    "field": "dataset_text_field",
    "column": "dataset_text_field",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "seq_len": "max_length",
    "sample_packing": "packing",
    "neat_packing": "packing",
    "packed": "packing",
    "preprocessing_num_workers": "dataset_num_proc",
    "num_proc": "dataset_num_proc",
    "max_train_samples": "max_samples",
    "buffer_size": "shuffle_buffer_size",
    "tokenized_path": "dataset_cache_dir",
    "dataset_prepared_path": "dataset_cache_dir",
    "train_on_completions": "completion_only_loss",
    "train_on_inputs": "completion_only_loss",
    "train_on_prompt": "completion_only_loss",
    "train_on_input": "completion_only_loss",
    "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "batch_size_val": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "num_steps": "max_steps",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "lr_warmup_steps": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "torch_dtype": "bf16",
    "dtype": "bf16",
    "flash_attn": "attn_implementation",
    "use_liger_kernel": "kernels",
    "random_seed": "seed",
    "log_interval": "logging_steps",
    "log_every_n_steps": "logging_steps",
    "val_set_size": "val_size",
    "val_split_fraction": "val_size",
    "evaluation_strategy": "eval_strategy",
    "save_interval": "save_steps",
    "resume": "resume_from_checkpoint",
    "out_dir": "output_dir",
    "force": "ignore_memory_limits",
    "nvme_offload_fraction": "offload_optimizer",
    "nvme_path": "offload_dir",
    "ac_offload_nvme": "offload_activations",
}
CONVERTED: dict[str, Callable[[object], object]] = {
    "train_on_inputs": _not,
    "train_on_prompt": _not,
    "train_on_input": _not,
    "torch_dtype": _dtype_as_bf16,
    "dtype": _dtype_as_bf16,
    "use_liger_kernel": _liger_as_kernels,
    "ac_offload_nvme": _nvme,
}
REQUIRED = ("model_name_or_path", "dataset")
NEVER = {
    "hub_token": "a token does not belong in a config, which is kept beside the result: log in, or set HF_TOKEN",
    "trust_remote_code": "code that comes with a model is never run; model classes that transformers has are trained",
}
NOT_YET = frozenset(
    ("num_workers", "dataloader_num_workers", *DiskSettings.model_fields, *GenerationSettings.model_fields)
)


def resolve(*sources: Sequence[Setting]) -> Resolved:
    """The config of these settings; a later source wins over an earlier one.

    Raises BadInput, naming the place: a key that is not known (with the nearest known one), a key given twice in one
    source under any spelling, a required key that is missing, a value that its key does not take, a broken rule.
    """
    settings: dict[str, Setting] = {}
    notices = []
    for source in sources:
        given: dict[str, Setting] = {}
        for setting in source:
            name = _canonical(setting)
            if name in given:
                first = given[name]
                same = first.key == setting.key
                twice = f"{name} is given twice" if same else f"{first.key} and {setting.key} are both {name}"
                raise BadInput(f"{setting.where}: {twice} (also at {first.where}): keep one")
            given[name] = setting
            if name != setting.key:
                negated = " (the opposite)" if CONVERTED.get(setting.key) is _not else ""
                notices.append(f"{setting.where}: {setting.key} is taken as {name}{negated}")
        settings |= given
    values = {name: CONVERTED.get(s.key, _unchanged)(s.value) for name, s in settings.items()}
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as error:
        raise BadInput(_sentence(error, settings)) from None
    for name in REQUIRED:
        if not getattr(config, name):
            raise BadInput(_missing(name, settings, sources))
    return Resolved(config, tuple(notices))


def _canonical(setting: Setting) -> str:
    if setting.key in TrainConfig.model_fields:
        return setting.key
    if ALIASES.get(setting.key) in TrainConfig.model_fields:
        return ALIASES[setting.key]
    if setting.key in NEVER:
        raise BadInput(f"{setting.where}: {setting.key}: {NEVER[setting.key]}")
    if ALIASES.get(setting.key, setting.key) in NOT_YET:
        raise BadInput(f"{setting.where}: {setting.key} is not available in this version: leave it out")
    near = get_close_matches(setting.key, [*TrainConfig.model_fields, *ALIASES], n=1)
    hint = f": did you mean {near[0]}?" if near else f"; known keys: {', '.join(TrainConfig.model_fields)}"
    raise BadInput(f"{setting.where}: unknown key {setting.key}{hint}")


def _missing(name: str, settings: dict[str, Setting], sources: Sequence[Sequence[Setting]]) -> str:
    if name in settings:
        return f"{settings[name].where}: {name} is empty, and it has no default: add `{name}: ...`"
    wheres = [s.where.rsplit(":", 1)[0] for source in sources for s in source]
    where = f"{wheres[0]}: " if wheres else ""
    return f"{where}{name} is not given, and it has no default: add `{name}: ...`"


def _sentence(error: ValidationError, settings: dict[str, Setting]) -> str:
    """The first of pydantic's complaints as one sentence that says where the value was written."""
    first = error.errors()[0]
    place = first["loc"]
    if not place:  # a rule between fields: its sentence names the keys
        text = str(first["ctx"]["error"])
        named = [s.where for name, s in settings.items() if re.search(rf"\b{name}\b", text)]
        return f"{named[0]}: {text}" if named else text
    name = str(place[0])
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(place[-1]), DatasetSpec.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(DatasetSpec.model_fields)}"
        return f"{settings[name].where}: {name}: unknown key {place[-1]}: {hint}"
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[1:] if _is_visible(part))
    text = " or ".join(_plain(e) for e in error.errors() if e["loc"][:1] == place[:1])
    found = "" if first["type"] == "value_error" else f"found {_short(first['input'])}, "
    return f"{settings[name].where}: {name}{inner}: {found}{text}"


def _short(value: object) -> str:
    """As Python writes it, cut: with YAML's aliases a few lines make a value whose text fills the memory."""
    short = Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, 200, 200
    return short.repr(value)


def _is_visible(part: int | str) -> bool:
    """Whether a part of pydantic's location is a place in the value, not the name of a member of a union."""
    return isinstance(part, int) or part in DatasetSpec.model_fields


def _plain(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = error["msg"].partition(", unable to")[0].replace("Input should", "should")
    return f"{text[0].lower()}{text[1:]}"


def _unchanged(value: object) -> object:
    return value
