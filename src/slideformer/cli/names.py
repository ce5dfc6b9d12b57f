"""From settings as users write them to a TrainConfig: other tools' spellings, unknown keys, and places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slideformer.config import TrainConfig
from slideformer.config.faults import WrongSettings, unknown
from slideformer.config.spellings import ALIASES, FOREIGN, Foreign
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


CONVERTED: dict[str, Callable[[object], object]] = {
    "train_on_inputs": _not,
    "train_on_prompt": _not,
    "train_on_input": _not,
    "torch_dtype": _dtype_as_bf16,
    "dtype": _dtype_as_bf16,
    "use_liger_kernel": _liger_as_kernels,
    "ac_offload_nvme": _nvme,
}
BOTH_LOSSES = ("train_on_inputs", "train_on_prompt", "train_on_input", "train_on_completions")
"""What other tools say of conversations and of prompts alike."""
REQUIRED = ("model_name_or_path", "dataset")
WITHOUT_EFFECT = {
    "dataloader_num_workers": "has no effect: batches are cut from encoded rows inside the run, and what encodes in "
    "parallel is dataset_num_proc",
}
"""Settings of other tools whose configs are taken as they are -> what there is to say when they ask for something."""


def resolve(*sources: Sequence[Setting], required: Sequence[str] | None = None) -> Resolved:
    """The config of these settings; a later source wins over an earlier one. required: None is REQUIRED.

    Raises BadInput, naming the place: a key that is not known (with the nearest known one), a key given twice in one
    source under any spelling, a required key that is missing, a value that its key does not take, a broken rule.
    """
    settings: dict[str, Setting] = {}
    notices = []
    for source in sources:
        given: dict[str, Setting] = {}
        for setting in source:
            if setting.key in FOREIGN:
                notices += _answered(setting, FOREIGN[setting.key])
                continue
            name = _canonical(setting)
            if name in given:
                first = given[name]
                same = first.key == setting.key
                twice = f"{name} is given twice" if same else f"{first.key} and {setting.key} are both {name}"
                raise BadInput(f"{setting.where}: {twice} (also at {first.where}): keep one")
            given[name] = setting
            if name in WITHOUT_EFFECT and setting.value not in (0, "0"):
                notices.append(f"{setting.where}: {setting.key} {WITHOUT_EFFECT[name]}")
            elif name != setting.key:
                negated = " (the opposite)" if CONVERTED.get(setting.key) is _not else ""
                named = f"{name} and assistant_only_loss" if setting.key in BOTH_LOSSES else name
                notices.append(f"{setting.where}: {setting.key} is taken as {named}{negated}")
        settings |= given
    for setting in [s for s in settings.values() if s.key in BOTH_LOSSES]:
        settings.setdefault("assistant_only_loss", setting)
    values = {name: CONVERTED.get(s.key, _unchanged)(s.value) for name, s in settings.items()}
    try:
        config = TrainConfig.model_validate(values)
    except WrongSettings as wrong:
        named = [settings[key].where for key in wrong.keys if key in settings]
        raise BadInput(f"{named[0]}: {wrong}" if named else str(wrong)) from None
    for name in REQUIRED if required is None else required:
        if not getattr(config, name):
            raise BadInput(_missing(name, settings, sources))
    if "max_steps" in values and config.max_steps < 0 and values["max_steps"] not in (-1, None):
        where = settings["max_steps"].where
        notices.append(f"{where}: max_steps: 0 is no limit, so num_train_epochs decides: {config.num_train_epochs:g}")
    return Resolved(config, tuple(notices))


def _canonical(setting: Setting) -> str:
    if setting.key in TrainConfig.model_fields:
        return setting.key
    if ALIASES.get(setting.key) in TrainConfig.model_fields:
        return ALIASES[setting.key]
    raise BadInput(f"{setting.where}: {unknown(setting.key, TrainConfig.model_fields, ALIASES)}")


def _answered(setting: Setting, foreign: Foreign) -> list[str]:
    """What there is to say of a setting that only other tools have."""
    if foreign.asks_for_nothing(setting.value):
        return []
    if foreign.takes(setting.value):
        return [f"{setting.where}: {setting.key} has no effect: {foreign.says}"]
    raise BadInput(f"{setting.where}: {setting.key}: {foreign.says}; leave it out")


def _missing(name: str, settings: dict[str, Setting], sources: Sequence[Sequence[Setting]]) -> str:
    if name in settings:
        return f"{settings[name].where}: {name} is empty, and it has no default: add `{name}: ...`"
    wheres = [s.where.rsplit(":", 1)[0] for source in sources for s in source]
    where = f"{wheres[0]}: " if wheres else ""
    return f"{where}{name} is not given, and it has no default: add `{name}: ...`"


def _unchanged(value: object) -> object:
    return value
