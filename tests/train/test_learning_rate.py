"""Rates asked by step, against transformers' schedules stepped beside an optimizer as its trainer does."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler
from transformers.trainer_utils import SchedulerType

from slideformer.config import FOLLOWS_A_METRIC, TrainConfig
from slideformer.config import Schedule as ScheduleName
from slideformer.errors import BadInput
from slideformer.train.schedule import Schedule, learning_rate, num_warmup_steps

BASE, NUM_STEPS = 3e-4, 23
KWARGS = {
    "cosine": {"num_cycles": 0.7},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 1e-6, "power": 2.0},
    "inverse_sqrt": {"timescale": 7},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.05},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "greedy": {"patience": 1, "factor": 0.9, "min_lr": 1e-6, "window_size": 5, "smooth": True},
}
STEPPED = [name for name in get_args(ScheduleName) if name not in FOLLOWS_A_METRIC]


def config(**fields: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model_name_or_path": "m", "dataset": "d", "learning_rate": BASE, "warmup_steps": 0, **fields}
    )


def ours(num_steps: int = NUM_STEPS, **fields: object) -> list[float]:
    schedule = Schedule(config(**fields), num_steps)
    return [schedule.rate(k) for k in range(num_steps)]


def theirs(make, num_steps: int = NUM_STEPS) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_every_schedule_of_transformers_has_its_name_here() -> None:
    assert set(get_args(ScheduleName)) == {kind.value for kind in SchedulerType}


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_every_step_has_transformers_rate(name, warmup, with_kwargs) -> None:
    if name == "constant" and warmup:
        warmup = 0
    needs = {"warmup_stable_decay": {"num_decay_steps": 4}, "cosine_with_min_lr": {"min_lr_rate": 0.1}}
    needs["cosine_warmup_with_min_lr"] = needs["cosine_with_min_lr"]
    kwargs = KWARGS.get(name, {}) if with_kwargs else needs.get(name, {})
    if name == "cosine_warmup_with_min_lr" and with_kwargs and warmup == 0:
        kwargs = {**kwargs, "warmup_lr_rate": None}
    expected = theirs(lambda o: get_scheduler(name, o, warmup, NUM_STEPS, dict(kwargs)))
    # Both compute in double; the order of the operations may differ by a few.
    found = ours(lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(found)) > 1 or name.startswith("constant")


@pytest.mark.parametrize("name", FOLLOWS_A_METRIC)
def test_schedules_that_follow_a_metric_change_when_its_evaluations_say_so(name) -> None:
    schedule = Schedule(
        config(lr_scheduler_type=name, val_size=2, warmup_steps=None, lr_scheduler_kwargs=KWARGS[name]), 9
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    reference = get_scheduler(name, optimizer, scheduler_specific_kwargs=dict(KWARGS[name]))
    rates = []
    for step, metric in enumerate([3.0, 2.0, 2.5, 2.4, 2.3, 2.6, 2.7, 2.8, 2.9]):
        rates.append(schedule.rate(step))
        assert rates[-1] == optimizer.param_groups[0]["lr"]
        schedule.observe(metric)
        optimizer.step()
        reference.step(metric)
    assert rates[0] == BASE
    assert len(set(rates)) > 1


@pytest.mark.parametrize("warmup", [0, 5])
def test_min_lr_ratio_of_cosine_is_transformers_min_lr_rate(warmup) -> None:
    expected = theirs(lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, warmup, NUM_STEPS, min_lr_rate=0.1))
    assert ours(warmup_steps=warmup, min_lr_ratio=0.1) == pytest.approx(expected, rel=1e-12)


def test_min_lr_ratio_of_linear_is_where_it_ends() -> None:
    fields = config(lr_scheduler_type="linear", min_lr_ratio=0.25)
    rates = [learning_rate(fields, k, 8) for k in range(9)]
    assert rates[0] == BASE
    assert rates[8] == pytest.approx(BASE / 4)
    assert rates[4] == pytest.approx((rates[0] + rates[8]) / 2)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "get_wsd_schedule is missing 1 required positional argument: 'num_decay_steps'",
        ),
        (
            {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}},
            "it got an unexpected keyword argument 'power'",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-9}, "must be smaller than initial lr"),
    ],
)
def test_what_a_schedule_does_not_take_is_told_before_the_run(fields, complaint) -> None:
    with pytest.raises(BadInput, match=f"lr_scheduler_type: {fields['lr_scheduler_type']} cannot be used") as caught:
        Schedule(config(**fields), 9)
    assert complaint in str(caught.value)


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
