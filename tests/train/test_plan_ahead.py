"""A plan counts updates ahead of clipping where max_host_memory says how much there is, and says both step times."""

from __future__ import annotations

from pathlib import Path

import pytest

from slideformer.config import TrainConfig
from slideformer.train.plan import RunPlan, plan_run

MODEL = Path(__file__).parents[1] / "recipes" / "models" / "Llama-3.2-1B"
GIB = 2**30


def planned(**fields: object) -> RunPlan:
    always = {"dataset": "data.jsonl", "output_dir": "runs", "device": "cuda", "max_gpu_memory": "20GiB"}
    sizes = {"per_device_train_batch_size": 32, "max_length": 1024}
    given = {"model_name_or_path": str(MODEL), "placement": "stream", **always, **sizes, **fields}
    return plan_run(TrainConfig.model_validate(given))


@pytest.mark.parametrize("memory_gib", [24, 60])
def test_second_copies_are_counted_within_the_host_s_limit_and_make_both_kinds_of_steps_shorter(
    memory_gib: int,
) -> None:
    without, found = planned(), planned(max_host_memory=f"{memory_gib}GiB")
    assert "second copies" not in without.budget.host and without.clipped_s is None
    assert 0 < found.budget.host["second copies"] < found.budget.host_nbytes <= memory_gib * GIB
    assert found.step_s <= found.clipped_s < without.step_s
    assert f": {found.step_s:.3g} s ({found.clipped_s:.3g} s when clipped), " in " ".join(found.text().split())
    assert "when clipped" not in without.text()
    assert found.as_dict()["clipped_step_time"] == found.clipped_s
    assert without.as_dict()["clipped_step_time"] == without.step_s


def test_more_memory_makes_clipped_steps_shorter() -> None:
    little, much = planned(max_host_memory="24GiB"), planned(max_host_memory="60GiB")
    assert len(little.options.ahead) < len(much.options.ahead) and much.clipped_s < little.clipped_s


@pytest.mark.parametrize("off", [{"update_ahead": "none"}, {"max_grad_norm": 0.0}], ids=str)
def test_without_clipping_or_second_copies_there_is_one_time(off: dict[str, object]) -> None:
    found = planned(max_host_memory="60GiB", **off)
    assert found.clipped_s is None and "second copies" not in found.budget.host
