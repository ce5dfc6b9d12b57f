"""What the settings of the disk tier and of generated samples take and refuse, and the rules between them."""

from __future__ import annotations

import pytest

from slideformer.config import TrainConfig
from slideformer.errors import BadInput

MINIMAL = {"model_name_or_path": "model", "dataset": "rows.jsonl"}


def make(**fields: object) -> TrainConfig:
    return TrainConfig.model_validate({**MINIMAL, **fields})


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, (0, 0, 0)),
        ({"offload_optimizer": "cpu", "offload_activations": "none"}, (0, 0, 0)),
        ({"offload_dir": "d"}, (None, None, None)),  # as much as the host has no room for
        ({"offload_dir": "d", "offload_weights": "cpu", "offload_activations": "none"}, (None, 0, 0)),
        ({"offload_dir": "d", "offload_optimizer": "nvme"}, (1, None, None)),
        ({"offload_dir": "d", "offload_optimizer": 0.25, "offload_weights": "0.5"}, (0.25, 0.5, None)),
        ({"offload_dir": "d", "offload_optimizer": 0, "offload_weights": 1}, (0, 1, None)),
        ({"offload_dir": "d", "offload_activations": "nvme"}, (None, None, 1)),
        ({"offload_dir": "d", "offload_activations": 0.75}, (None, None, 0.75)),
    ],
)
def test_what_lies_on_the_disk_is_a_tier_a_share_or_what_has_no_room(fields, shares) -> None:
    config = make(**fields)
    assert (config.optimizer_on_disk, config.weights_on_disk, config.activations_on_disk) == shares


def test_sizes_and_endurance_are_as_people_write_them() -> None:
    config = make(offload_optimizer="nvme", offload_dir="d", disk_tbw="600", max_disk_writes="2TB")
    assert (config.disk_tbw, config.max_disk_writes) == (600.0, 2 * 10**12)
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("written", "means"),
    [(["Once", "2+2="], ("Once", "2+2=")), ("prompts.txt", "prompts.txt"), (["one"], ("one",))],
)
def test_prompts_are_a_list_or_a_file(written, means) -> None:
    assert make(generate_steps=5, generate_prompts=written).generate_prompts == means


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"offload_optimizer": "nvme"}, "offload_optimizer is nvme, but offload_dir is not given: name a folder on a"),
        ({"offload_weights": 0.5}, "offload_weights is 0.5, but offload_dir is not given"),
        ({"offload_activations": "nvme"}, "offload_activations is nvme, but offload_dir is not given"),
        ({"offload_optimizer": "disk"}, "should be 'auto', 'cpu' or 'nvme' or should be a valid number"),
        ({"offload_optimizer": 1.5}, "less than or equal to 1"),
        ({"offload_weights": True}, "found yes, which is not a value of offload_weights"),
        ({"offload_dir": ""}, "offload_dir is empty"),
        (
            {"offload_optimizer": "nvme", "offload_dir": "d", "placement": "resident"},
            "offload_optimizer is nvme, but placement: resident keeps everything on the device",
        ),
        ({"offload_optimizer": "nvme", "offload_dir": "./model/"}, "offload_dir is the model's own folder"),
        ({"output_dir": "a", "offload_dir": "./a"}, "output_dir a is in offload_dir ./a"),
        ({"output_dir": "a/b", "offload_dir": "a"}, "output_dir a/b is in offload_dir a"),
        ({"max_disk_writes": "1TB"}, "max_disk_writes is given, but nothing lies on the disk"),
        ({"max_disk_writes": 5}, "found 5, which is no size"),
        ({"disk_tbw": 0}, "greater than 0"),
        ({"disk_tbw": 600}, "disk_tbw is given, but nothing lies on the disk: give offload_dir, or drop it"),
        ({"keep_offload_dir": True}, "keep_offload_dir is true, but nothing lies on the disk: give offload_dir"),
        ({"disk_tbw": "inf"}, "found 'inf', should be a finite number"),
        ({"reuse_offload_dir": True}, "reuse_offload_dir is true, but nothing lies on the disk: give offload_dir"),
        (
            {"reuse_offload_dir": True, "keep_offload_dir": True, "offload_dir": "d"},
            "reuse_offload_dir and keep_offload_dir are both true, and what was kept is not taken over: keep one",
        ),
        ({"use_gds": True}, "use_gds is true, but nothing lies on the disk: give offload_dir, or drop it"),
        ({"generate_steps": 5}, "generate_steps is 5, but there is nothing to go on from: give generate_prompts"),
        ({"generate_prompts": ["a"]}, "generate_prompts is given, but generate_steps is 0"),
        ({"generate_steps": -1}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(fields, complaint) -> None:
    with pytest.raises(BadInput) as caught:
        make(**fields)
    assert complaint in str(caught.value)
