"""A plan that a limit has no room for: what is said, and the one JSON object."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

SIZE = r"([0-9.]+) ([KM]iB)"
KIB = {"KiB": 1, "MiB": 1024}
MODEL = Path(__file__).parents[1] / "recipes" / "models" / "Llama-3.2-1B"


@pytest.fixture
def too_small(slideformer, yaml_for):
    """A plan for a GPU of which the run may take 500 KiB."""

    def run(*words: str):
        return slideformer("plan", yaml_for(device="cuda"), "max_gpu_memory=500KiB", *words)

    return run


def test_a_plan_with_too_little_gpu_memory_says_what_takes_it_and_the_cheapest_change(too_small) -> None:
    done = too_small()
    assert done.returncode == 3
    assert "device  " in done.stdout  # the plan comes all the same
    last = done.stderr.strip().splitlines()[-1]
    said, _, change = last.partition(". Cheapest change that makes it fit: ")
    head, _, terms = said.partition(": working memory ")
    need, unit, more, more_unit = re.fullmatch(
        rf"error: this run needs {SIZE} on the device, {SIZE} more than the 500\.0 KiB of max_gpu_memory", head
    ).groups()
    assert float(need) * KIB[unit] == pytest.approx(500 + float(more) * KIB[more_unit], rel=0.06)  # of 0.9 MiB
    sizes = [float(number) * KIB[unit] for number, unit in re.findall(SIZE, terms)]
    assert sum(sizes) == pytest.approx(500 + float(more) * KIB[more_unit], abs=0.05 * (1 + len(sizes)))
    assert too_small(*change.replace(": ", "=").split(", ")).returncode == 0


def test_a_plan_that_does_not_fit_is_one_json_object_with_its_error(too_small) -> None:
    done = too_small("--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["exit_code"] == 3
    assert done.stderr.strip().splitlines()[-1] == f"error: {found['error']}"
    assert found["device_nbytes"] == sum(found["device"].values()) > 500 * 2**10


def test_smaller_tiles_are_advised_before_what_changes_the_run(slideformer, yaml_for) -> None:
    """The output projection passes in slices of one tile each, with an fp32 sum: 12 bytes of the GPU an element."""
    sizes = {"model_name_or_path": MODEL, "max_length": 1024, "tile_numel": 16 << 20, "grad_slots": 1}
    config = yaml_for(device="cuda", **sizes, max_gpu_memory="760MiB", max_host_memory="100GiB")
    done = slideformer("plan", config)
    assert done.returncode == 3
    change = done.stderr.strip().rpartition("Cheapest change that makes it fit: ")[2]
    assert re.fullmatch(r"tile_numel: (8388608|4194304)", change), done.stderr
    assert slideformer("plan", config, change.replace(": ", "=")).returncode == 0
    last = slideformer("plan", config, "tile_numel=4194304", "max_gpu_memory=600MiB").stderr.strip().splitlines()[-1]
    assert "tile_numel" not in last, "which are no smaller than that"


@pytest.mark.parametrize(("train", "evaluation"), [(4, 2), (2, 8), (1, 8)])
def test_advice_is_true_where_an_evaluation_has_rows_of_its_own(slideformer, yaml_for, train, evaluation) -> None:
    batches = {"per_device_train_batch_size": train, "per_device_eval_batch_size": evaluation}
    config = yaml_for(device="cuda", max_length=256, gradient_accumulation_steps=2, max_grad_norm=0.0, **batches)
    one_row = (
        "per_device_train_batch_size=1",
        "per_device_eval_batch_size=1",
        f"gradient_accumulation_steps={2 * train}",
    )
    least = json.loads(slideformer("plan", config, "--json", *one_row, "grad_slots=1", "window=1").stdout)
    limit = f"max_gpu_memory={least['device_nbytes'] * 5 // 4}"
    done = slideformer("plan", config, limit)
    assert done.returncode == 3
    change = done.stderr.strip().rpartition("Cheapest change that makes it fit: ")[2]
    assert "per_device_eval_batch_size: " in change, done.stderr
    if train == 1:
        assert "train" not in change and "accumulation" not in change
    assert slideformer("plan", config, limit, *change.replace(": ", "=").split(", ")).returncode == 0, change


def test_a_plan_for_the_cpu_says_that_a_limit_of_a_gpu_is_none_of_its(slideformer, yaml_for, caplog) -> None:
    config = yaml_for(max_gpu_memory="1MiB")
    for words in (("plan",), ("train", "--dry-run")):
        caplog.clear()
        assert slideformer(*words, config).returncode == 0
        assert caplog.text.count("max_gpu_memory limits a GPU; on the CPU max_host_memory limits everything") == 1, (
            words
        )


def test_a_plan_for_the_cpu_streams_what_is_to_be_resident_on_a_gpu_as_a_run_does(slideformer, yaml_for) -> None:
    plans = [
        slideformer("plan", yaml_for(placement=placement), "--json").stdout for placement in ("resident", "stream")
    ]
    assert plans[0] == plans[1] and json.loads(plans[0])["placement"]["resident"] == []
