"""Every rule between fields of a config, each with the sentence that says how to keep it."""

from __future__ import annotations

from os.path import abspath
from typing import TYPE_CHECKING

from slideformer.config.generation import GenerationSettings
from slideformer.config.optimizer import FOLLOWS_A_METRIC, WITH_A_FLOOR, WITHOUT_WARMUP

if TYPE_CHECKING:
    from slideformer.config.train_config import TrainConfig

OFFLOADED = ("offload_optimizer", "offload_weights", "offload_activations")
NOT_ON_DISK = ("auto", "cpu", "none", 0)


def rules(config: TrainConfig) -> list[tuple[bool, str]]:
    """Every rule between fields, as (is it broken, what to say)."""
    in_python = not config.dataset  # rows, and more of them to evaluate on, are given beside the config
    has_eval = bool(config.eval_dataset) or config.val_size > 0 or in_python
    return [
        *_of_data(config),
        *_of_moments(config, has_eval),
        *_of_the_schedule(config),
        *_of_the_best(config),
        *_of_the_disk(config),
        *_of_generation(config),
        (
            config.update == "eager" and config.max_grad_norm > 0,
            "update: eager cannot clip (it updates before the norm is known), and "
            + f"max_grad_norm is {config.max_grad_norm:g}: set max_grad_norm: 0, or update: deferred",
        ),
        (
            config.update == "eager" and config.on_nonfinite == "skip",
            "on_nonfinite: skip needs update: deferred, because an eager update cannot be taken back",
        ),
        (
            config.warmup_ratio is not None and config.warmup_steps is not None,
            "warmup_ratio and warmup_steps are both given: keep one",
        ),
        (
            _same(config.output_dir, config.model_name_or_path),
            f"output_dir is the model's own folder, {config.output_dir}, which it would overwrite: choose another",
        ),
    ]


def _of_data(config: TrainConfig) -> list[tuple[bool, str]]:
    strategies = {"eval_strategy": config.eval_strategy, "save_strategy": config.save_strategy}
    epochs = [key for key, strategy in strategies.items() if strategy == "epoch"]
    return [
        (
            config.streaming and config.max_steps < 0,
            "streaming is true, so nobody knows how many rows there are: set max_steps",
        ),
        (
            config.streaming and config.val_size > 0,
            "streaming is true, so val_size cannot be taken out of the rows: give eval_dataset",
        ),
        (
            config.streaming and bool(epochs),
            f"streaming is true, so there are no epochs, but {' and '.join(epochs)} is epoch: set it to steps",
        ),
        (
            bool(config.eval_dataset) and config.val_size > 0,
            "eval_dataset and val_size are both given: evaluate on files, or on rows taken from the training rows",
        ),
        (
            config.val_size >= 1 and not float(config.val_size).is_integer(),
            f"val_size is {config.val_size:g}: give a number of rows, or a share below 1",
        ),
    ]


def _of_moments(config: TrainConfig, has_eval: bool) -> list[tuple[bool, str]]:
    """When there are evaluations and checkpoints."""
    return [
        (
            config.eval_strategy != "no" and not has_eval,
            f"eval_strategy is {config.eval_strategy}, but there is nothing to evaluate: "
            + "give eval_dataset or val_size",
        ),
        (
            config.eval_on_start and not has_eval,
            "eval_on_start is true, but there is nothing to evaluate: give eval_dataset or val_size",
        ),
        (
            config.eval_strategy == "steps" and config.eval_steps is None,
            "eval_strategy is steps, but eval_steps is not given: say after how many steps",
        ),
        (
            config.eval_steps is not None and config.eval_strategy != "steps",
            f"eval_steps is given, but eval_strategy is {config.eval_strategy}: set eval_strategy: steps",
        ),
        (
            config.save_strategy == "steps" and config.save_steps is None,
            "save_strategy is steps, but save_steps is not given: say after how many steps",
        ),
        (
            config.save_steps is not None and config.save_strategy != "steps",
            f"save_steps is given, but save_strategy is {config.save_strategy}: set save_strategy: steps",
        ),
        (
            config.resume_from_checkpoint == "",
            "resume_from_checkpoint is empty: give a checkpoint's folder, true or auto",
        ),
    ]


def _of_the_schedule(config: TrainConfig) -> list[tuple[bool, str]]:
    name = config.lr_scheduler_type
    cold = name in WITHOUT_WARMUP
    instead = "use constant_with_warmup, or drop the warm-up" if name == "constant" else "drop the warm-up"
    return [
        (
            cold and bool(config.warmup_ratio or config.warmup_steps),
            f"lr_scheduler_type: {name} has no warm-up: {instead}",
        ),
        (
            name not in WITH_A_FLOOR and config.min_lr_ratio > 0,
            f"min_lr_ratio has no meaning with lr_scheduler_type: {name}: drop it"
            + ("" if name.startswith("constant") else ", or say it in lr_scheduler_kwargs"),
        ),
        (
            name in FOLLOWS_A_METRIC and config.eval_strategy == "no",
            f"lr_scheduler_type: {name} follows {config.metric_for_best_model}, but nothing is evaluated: give "
            + "eval_dataset or val_size",
        ),
    ]


def _of_the_best(config: TrainConfig) -> list[tuple[bool, str]]:
    """When checkpoints are compared."""
    judges = "load_best_model_at_end" if config.load_best_model_at_end else "early_stopping_patience"
    asked = config.load_best_model_at_end or config.early_stopping_patience is not None
    each = config.eval_steps if config.eval_strategy == "steps" else None
    return [
        (
            asked and config.eval_strategy == "no",
            f"{judges} needs evaluations, but eval_strategy is no: give eval_dataset or val_size",
        ),
        (
            config.load_best_model_at_end
            and (config.save_strategy != config.eval_strategy or bool(each and (config.save_steps or 0) % each)),
            "load_best_model_at_end needs a checkpoint at evaluations: set save_strategy as eval_strategy, and "
            + "save_steps to eval_steps or a multiple of it",
        ),
    ]


def _of_the_disk(config: TrainConfig) -> list[tuple[bool, str]]:
    used = [name for name in OFFLOADED if getattr(config, name) not in NOT_ON_DISK]
    said = f"{used[0]} is {getattr(config, used[0])}" if used else ""
    return [
        (
            bool(used) and not config.offload_dir,
            f"{said}, but offload_dir is not given: name a folder on a local NVMe disk, which will be written to a lot",
        ),
        (
            bool(used) and config.placement == "resident",
            f"{said}, but placement: resident keeps everything on the device: drop one of them",
        ),
        (
            config.offload_dir == "",
            "offload_dir is empty: name a folder on a local NVMe disk, or leave it out",
        ),
        (
            config.max_disk_writes is not None and config.offload_dir is None,
            "max_disk_writes is given, but nothing lies on the disk: give offload_dir, or drop it",
        ),
        (
            config.disk_tbw is not None and config.offload_dir is None,
            "disk_tbw is given, but nothing lies on the disk: give offload_dir, or drop it",
        ),
        (
            config.keep_offload_dir and config.offload_dir is None,
            "keep_offload_dir is true, but nothing lies on the disk: give offload_dir, or drop it",
        ),
        (
            config.reuse_offload_dir and config.offload_dir is None,
            "reuse_offload_dir is true, but nothing lies on the disk: give offload_dir, or drop it",
        ),
        (
            config.reuse_offload_dir and config.keep_offload_dir,
            "reuse_offload_dir and keep_offload_dir are both true, and what was kept is not taken over: keep one",
        ),
        (
            config.use_gds and config.offload_dir is None,
            "use_gds is true, but nothing lies on the disk: give offload_dir, or drop it",
        ),
        (
            bool(used) and _same(config.offload_dir, config.model_name_or_path),
            f"offload_dir is the model's own folder, {config.offload_dir}: choose another",
        ),
        (
            config.offload_dir is not None and _within(config.output_dir, config.offload_dir),
            f"output_dir {config.output_dir} is in offload_dir {config.offload_dir}, whose files go at the end: choose "
            + "another folder for one of them",
        ),
    ]


def _of_generation(config: GenerationSettings) -> list[tuple[bool, str]]:
    return [
        (
            config.generate_steps > 0 and not config.generate_prompts,
            f"generate_steps is {config.generate_steps}, but there is nothing to go on from: give generate_prompts",
        ),
        (
            bool(config.generate_prompts) and not config.generate_steps,
            "generate_prompts is given, but generate_steps is 0: say after how many steps",
        ),
    ]


def _same(path: str | None, other: str) -> bool:
    return bool(path and other) and abspath(path) == abspath(other)


def _within(path: str, folder: str) -> bool:
    """The path is the folder, or in it."""
    return (abspath(path) + "/").startswith(abspath(folder).rstrip("/") + "/")
