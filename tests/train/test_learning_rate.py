"""Schedules against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from slideformer.config import TrainConfig
from slideformer.train.schedule import learning_rate, num_warmup_steps

BASE = 3e-4


def config(**fields: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model_name_or_path": "m", "dataset": "d", "learning_rate": BASE, "warmup_steps": 0, **fields}
    )


def theirs(make, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize(
    ("fields", "make"),
    [
        ({"lr_scheduler_type": "cosine"}, lambda o, w, n: get_cosine_schedule_with_warmup(o, w, n)),
        (
            {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
            lambda o, w, n: get_cosine_with_min_lr_schedule_with_warmup(o, w, n, min_lr_rate=0.1),
        ),
        ({"lr_scheduler_type": "linear"}, lambda o, w, n: get_linear_schedule_with_warmup(o, w, n)),
        ({"lr_scheduler_type": "constant_with_warmup"}, lambda o, w, n: get_constant_schedule_with_warmup(o, w)),
    ],
)
def test_every_step_has_transformers_rate(fields, make, warmup) -> None:
    num_steps = 23
    ours = [learning_rate(config(warmup_steps=warmup, **fields), k, num_steps) for k in range(num_steps)]
    # Both compute in double; the order of the operations differs by a few.
    assert ours == pytest.approx(theirs(lambda o: make(o, warmup, num_steps), num_steps), rel=1e-12)


def test_constant_is_constant() -> None:
    fields = {"lr_scheduler_type": "constant", "warmup_steps": None}
    assert [learning_rate(config(**fields), k, 9) for k in range(9)] == theirs(get_constant_schedule, 9)


def test_min_lr_ratio_of_linear_is_where_it_ends() -> None:
    rates = [learning_rate(config(lr_scheduler_type="linear", min_lr_ratio=0.25), k, 8) for k in range(9)]
    assert rates[0] == BASE
    assert rates[8] == pytest.approx(BASE / 4)
    assert rates[4] == pytest.approx((rates[0] + rates[8]) / 2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"warmup_steps": 7}, 7),
        ({"warmup_steps": 0}, 0),
        ({"warmup_steps": 0.101}, 11),
        ({"warmup_steps": None, "warmup_ratio": 0.03}, 3),
        ({"warmup_steps": None, "warmup_ratio": 0.031}, 4),
        ({"warmup_steps": None}, 3),
    ],
)
def test_warm_up_is_steps_or_a_share_rounded_up(fields, expected) -> None:
    assert num_warmup_steps(config(**fields), 100) == expected
