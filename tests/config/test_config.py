"""What TrainConfig takes, makes of it, and refuses."""

from __future__ import annotations

import pytest

from slideformer.config import DatasetSpec, TrainConfig
from slideformer.errors import BadInput

MINIMAL = {"model_name_or_path": "model", "dataset": "rows.jsonl"}


def make(**fields: object) -> TrainConfig:
    return TrainConfig.model_validate({**MINIMAL, **fields})


def test_a_config_is_frozen_and_survives_a_round_trip() -> None:
    config = make(warmup_steps=3, eval_dataset={"a": "x.jsonl"}, freeze=["embed"])
    with pytest.raises(BadInput, match="^seed cannot be set: a config stays as it was made, so give seed to TrainConf"):
        config.seed = 1
    assert config.seed == 42
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ({"dataset": "a.jsonl"}, [("a.jsonl", 1.0)]),
        ({"dataset": ["a.jsonl", {"path": "b.txt", "weight": 0.5}]}, [("a.jsonl", 1.0), ("b.txt", 0.5)]),
    ],
)
def test_a_dataset_is_a_path_or_a_list_with_weights(written, means) -> None:
    assert [(spec.path, spec.weight) for spec in make(**written).dataset] == means


@pytest.mark.parametrize(
    ("key", "written", "means"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("max_steps", "1e3", 1000),
        ("max_steps", 0, -1),
        ("max_steps", None, -1),
        ("max_grad_norm", None, 0.0),
        ("save_strategy", False, "no"),
        ("save_strategy", None, "no"),
        ("save_steps", "1e3", 1000),
        ("save_total_limit", None, None),
        ("resume_from_checkpoint", "auto", "auto"),
        ("resume_from_checkpoint", True, True),
        ("resume_from_checkpoint", None, False),
        ("resume_from_checkpoint", "runs/a/checkpoint-5", "runs/a/checkpoint-5"),
        ("eval_strategy", False, "no"),
        ("max_gpu_memory", "24GiB", 24 * 2**30),
        ("max_gpu_memory", "0.5 gb", 500_000_000),
        ("max_host_memory", 2**30, 2**30),
        ("freeze", "embed", ("embed",)),
        ("eval_dataset", "held.jsonl", {"": DatasetSpec(path="held.jsonl")}),
        ("eval_dataset", {"a": "held.jsonl"}, {"a": DatasetSpec(path="held.jsonl")}),
        ("eval_dataset", {"path": "rows", "split": "test"}, {"": DatasetSpec(path="rows", split="test")}),
        ("chat_template_kwargs", None, {}),
        ("packing", True, True),
        ("bf16", "auto", "auto"),
        ("bf16", True, True),
        ("report_to", "none", ()),
        ("report_to", False, ()),
        ("report_to", None, ()),
        ("report_to", "trackio", ("trackio",)),
        ("report_to", ["tensorboard", "wandb"], ("tensorboard", "wandb")),
        ("lr_scheduler_kwargs", None, {}),
        ("lr_scheduler_kwargs", {"lr_end": "1e-7", "decay_type": "1-sqrt"}, {"lr_end": 1e-7, "decay_type": "1-sqrt"}),
        ("metric_for_best_model", "loss", "eval_loss"),
    ],
)
def test_values_as_people_write_them(key, written, means) -> None:
    assert getattr(make(**{key: written}), key) == means


@pytest.mark.parametrize("size", ["1B", "200KiB", "1023.9KiB", "1MiB", "24GiB"])
def test_a_size_that_was_read_is_written_so_that_it_can_be_read_again(size) -> None:
    config = make(max_gpu_memory=size, max_host_memory=size, max_disk_writes=size, offload_dir="disk")
    assert isinstance(config.max_gpu_memory, int)
    assert TrainConfig(**config.model_dump(mode="json")) == config
    assert TrainConfig(**config.model_dump()) == config


@pytest.mark.parametrize("endless", ["inf", "1e999", "nan"])
def test_no_number_is_endless(endless) -> None:
    """The epochs of a run, or its warm-up, would be turned into steps."""
    for name in TrainConfig.model_fields:
        with pytest.raises(ValueError):
            make(**{name: float(endless)})
    for name in ("num_train_epochs", "learning_rate", "warmup_steps", "weight_decay", "adam_epsilon", "disk_tbw"):
        with pytest.raises(ValueError, match=f"^{name}: found '{endless}', should be a finite number"):
            make(**{name: endless})


@pytest.mark.parametrize(("written", "nbytes"), [(0, 0), ("0", 0), ("0GiB", 0), ("1B", 1), ("16GiB", 16 << 30)])
def test_memory_for_copies_may_be_none(written, nbytes):
    config = make(save_memory=written)
    assert config.save_memory == nbytes
    assert TrainConfig(**config.model_dump(mode="json")) == TrainConfig(**config.model_dump()) == config
    with pytest.raises(ValueError, match=r"save_memory: found .*, which is no size: write 24GiB"):
        make(save_memory=-1)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"seed": True}, "found yes, which is not a value of seed"),
        ({"learning_rate": "fast"}, "valid number"),
        ({"max_steps": "1.5"}, "valid integer"),
        ({"max_gpu_memory": 24}, "found 24, which is no size: write 24GiB"),
        ({"max_gpu_memory": "lots"}, "no size"),
        ({"freeze": "("}, "no regular expression"),
        ({"dataset": {"path": "a", "weight": 0}}, "greater than 0"),
        ({"window": 0}, "greater than or equal to 1"),
        ({"cpu_threads": 100000}, "less than or equal to 1024"),
        ({"save_total_limit": 0}, "greater than or equal to 1"),
        ({"save_strategy": "steps"}, "save_strategy is steps, but save_steps is not given: say after how many steps"),
        ({"save_strategy": "no", "save_steps": 5}, "save_steps is given, but save_strategy is no: set save_strategy: "),
        ({"save_strategy": True}, "found yes, which is not a value of save_strategy"),
        ({"resume_from_checkpoint": ""}, "resume_from_checkpoint is empty"),
        (
            {"dataset": {"path": "a", "columns": {"promt": "q"}}},
            "promt is no column that is used (did you mean prompt?)",
        ),
        ({"dataset": {"path": "a", "format": "csv"}}, "should be 'auto', 'messages'"),
        ({"streaming": True}, "nobody knows how many rows there are: set max_steps"),
        ({"streaming": True, "max_steps": 5, "val_size": 2}, "val_size cannot be taken out of the rows"),
        ({"streaming": True, "max_steps": 5, "eval_dataset": "a"}, "eval_strategy is epoch: set it to steps"),
        ({"max_samples": 0}, "greater than or equal to 1"),
        ({"report_to": "wandbb"}, "'wandb'"),
        ({"report_to": True}, "'wandb'"),
        ({"lr_scheduler_type": "greedy"}, "follows eval_loss, but nothing is evaluated"),
        ({"lr_scheduler_type": "polynomial", "min_lr_ratio": 0.1}, "drop it, or say it in lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "greedy", "val_size": 2, "warmup_steps": 2}, "greedy has no warm-up: drop the warm-up"),
        ({"early_stopping_patience": 2}, "early_stopping_patience needs evaluations, but eval_strategy is no"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs evaluations"),
        ({"load_best_model_at_end": True, "val_size": 2}, "needs a checkpoint at evaluations: set save_strategy"),
        (
            {"load_best_model_at_end": True, "val_size": 2, "eval_steps": 4, "save_steps": 6},
            "save_steps to eval_steps or a multiple",
        ),
        ({"update": "eager"}, "max_grad_norm is 1: set max_grad_norm: 0, or update: deferred"),
        ({"update": "eager", "max_grad_norm": 0, "on_nonfinite": "skip"}, "on_nonfinite: skip needs update: deferred"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio and warmup_steps are both given"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "constant has no warm-up"),
        ({"lr_scheduler_type": "constant", "min_lr_ratio": 0.1}, "min_lr_ratio has no meaning"),
        ({"eval_dataset": "a", "val_size": 2}, "eval_dataset and val_size are both given"),
        ({"val_size": 1.5}, "number of rows, or a share below 1"),
        ({"eval_strategy": "epoch"}, "there is nothing to evaluate"),
        ({"eval_on_start": True}, "there is nothing to evaluate"),
        ({"eval_strategy": "steps", "val_size": 2}, "eval_steps is not given"),
        ({"eval_strategy": "epoch", "eval_steps": 5, "val_size": 2}, "set eval_strategy: steps"),
        ({"output_dir": "./model/"}, "output_dir is the model's own folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(fields, complaint) -> None:
    with pytest.raises(BadInput) as caught:
        make(**fields)
    assert complaint in str(caught.value)


def test_defaults_that_depend_on_what_else_is_given() -> None:
    assert make().warmup_ratio == 0.03
    assert make(warmup_steps=0).warmup_ratio is None
    assert make(lr_scheduler_type="constant").warmup_ratio == 0.0
    assert make(seed=7).data_seed == 7
    assert make(seed=7, data_seed=8).data_seed == 8
    assert make(val_size=2).eval_strategy == "epoch"
    assert make(val_size=2, eval_steps=5).eval_strategy == "steps"
    assert make(val_size=2, eval_strategy="no").eval_strategy == "no"
    assert make(lr_scheduler_type="greedy", val_size=2).warmup_ratio == 0.0
    assert make(val_size=2).metric_for_best_model == "eval_loss"
    assert make(eval_dataset={"held": "x"}).metric_for_best_model == "eval_held_loss"
    assert make(per_device_train_batch_size=3).eval_batch_size == 3
    assert make(per_device_eval_batch_size=5).eval_batch_size == 5


@pytest.mark.parametrize(
    ("fields", "program"),
    [
        ({}, "deferred"),
        ({"max_grad_norm": 0}, "eager"),
        ({"max_grad_norm": 0, "on_nonfinite": "skip"}, "deferred"),
        ({"max_grad_norm": 0, "update": "deferred"}, "deferred"),
        ({"max_grad_norm": 0, "update": "eager"}, "eager"),
    ],
)
def test_updates_are_deferred_when_something_must_be_known_first(fields, program) -> None:
    assert make(**fields).update_program == program


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"learning_rate": "fast"}, "learning_rate: found 'fast', should be a valid number"),
        ({"lerning_rate": 1e-5}, "unknown key lerning_rate: did you mean learning_rate?"),
        ({"lr": 1e-5}, "unknown key lr: its name is learning_rate"),
        ({"hub_token": "hf_x"}, "hub_token: a token does not belong in a config, which is kept beside the result: "),
        ({"dataset": {"path": "a", "wieght": 2}}, "dataset: unknown key wieght: did you mean weight?"),
        ({"dataset": ["a", {"path": "b", "weight": -1}]}, "dataset[1].weight: found -1, should be greater than 0"),
        ({"val_size": 1.5}, "val_size is 1.5: give a number of rows, or a share below 1"),
    ],
)
def test_python_hears_one_sentence_too(fields, sentence) -> None:
    with pytest.raises(BadInput) as caught:
        TrainConfig(**fields)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_setting_without_a_name_is_refused() -> None:
    with pytest.raises(BadInput, match="found the key 3: keys are names"):
        TrainConfig.model_validate({3: 4})


@pytest.mark.parametrize(
    ("type_", "format_"),
    [("alpaca", "alpaca"), ("sharegpt", "sharegpt"), ("chat_template", "auto"), ("completion", "text")],
)
def test_a_dataset_says_its_type_as_axolotl_does(type_, format_) -> None:
    given = {"path": "rows.jsonl", "split": "train", "type": type_}
    config = TrainConfig(dataset=[given], eval_dataset={"held": given})
    assert [spec.format for spec in (*config.dataset, config.eval_dataset["held"])] == [format_, format_]
    assert config.dataset[0].split == "train"


def test_a_type_of_a_dataset_that_is_no_format_is_told_with_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"dataset\[0\].format: found 'input_output', should be 'auto', 'messages'"):
        TrainConfig(dataset={"path": "a", "type": "input_output"})
    with pytest.raises(BadInput, match="dataset: unknown key type"):
        TrainConfig(dataset={"path": "a", "type": "alpaca", "format": "alpaca"})
