"""A plan counts updates ahead of clipping in what max_host_memory or this machine has to spare, and says both step
times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from slideformer.config import TrainConfig
from slideformer.engine.ahead import fastest_ahead
from slideformer.engine.fit import spare_room
from slideformer.engine.placement import Room, place
from slideformer.engine.settle import deepened
from slideformer.train.plan import RunPlan, plan_run
from slideformer.train.setup import engine_options

MODEL = Path(__file__).parents[1] / "recipes" / "models" / "Llama-3.2-1B"
GIB = 2**30


def planned(*, elsewhere: bool = True, **fields: object) -> RunPlan:
    always = {"dataset": "data.jsonl", "output_dir": "runs", "device": "cuda", "max_gpu_memory": "20GiB"}
    sizes = {"per_device_train_batch_size": 32, "max_length": 1024}
    given = {"model_name_or_path": str(MODEL), "placement": "stream", **always, **sizes, **fields}
    return plan_run(TrainConfig.model_validate(given), elsewhere=elsewhere)


@pytest.mark.parametrize("memory_gib", [24, 60])
def test_second_copies_are_counted_within_the_host_s_limit_and_make_both_kinds_of_steps_shorter(
    memory_gib: int,
) -> None:
    without, found = planned(update_ahead="none"), planned(max_host_memory=f"{memory_gib}GiB")
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


def test_what_is_placed_is_what_a_run_with_its_updates_ahead_places() -> None:
    """The placement knows of the host's spare memory: without it another one would be the fastest."""
    limits = {"max_gpu_memory": "16GiB", "max_host_memory": "60GiB"}
    found = planned(placement="auto", per_device_train_batch_size=16, **limits)
    sizes = (found.decoder.hidden_size, found.decoder.dtype)
    room = Room(found.decoder.layout, engine_options(found.config), found.costs, *sizes, 16 * GIB, host_nbytes=60 * GIB)
    decided = {"ahead": found.options.ahead, "disk_ring": found.options.disk_ring}
    assert replace(place(room), **decided) == found.options
    assert replace(place(replace(room, host_nbytes=None)), **decided) != found.options


def test_updates_ahead_are_decided_before_the_rings_to_the_disk_as_in_a_run(tmp_path: Path) -> None:
    found = planned(max_host_memory="20GiB", offload_dir=str(tmp_path / "tier"), offload_optimizer=0.3)
    layout, sizes = found.decoder.layout, (found.decoder.hidden_size, found.decoder.dtype)
    options = replace(found.options, ahead="auto", disk_ring="auto")
    room = Room(layout, options, found.costs, *sizes, 20 * GIB, host_nbytes=20 * GIB)
    spare_nbytes = 20 * GIB - room.budgets.of(options).host_nbytes
    ahead = fastest_ahead(layout, options, spare_nbytes, found.costs, room.step_s)
    assert ahead and found.options.ahead == ahead
    deep = deepened(replace(options, ahead=ahead), found.decoder, "cuda", found.costs, room.budgets, 20 * GIB)
    assert found.options == deep and deep.ring_places > options.ring_places


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A folder with the config of a model whose second copies any machine has room for."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    LlamaConfig(**sizes, **heads, tie_word_embeddings=True).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("gpu", [None, "20GiB"])
def test_without_a_limit_this_machine_s_spare_memory_counts_as_it_does_for_a_run(small: str, gpu: str | None) -> None:
    """A limit above what there is is none, unless it is that of another machine."""
    given = {"model_name_or_path": small, "max_gpu_memory": gpu}
    found = planned(**given)
    assert found.options.ahead and found.budget.host["second copies"] > 0
    found.require_fit()
    vast = {**given, "max_host_memory": "1000TiB"}
    here = planned(elsewhere=False, **vast)
    assert here.options.ahead == found.options.ahead
    layout, options, costs = found.decoder.layout, replace(found.options, ahead=()), found.costs
    host_nbytes = found.budget.host_nbytes - found.budget.host["second copies"]
    sizes = (found.decoder.hidden_size, found.decoder.dtype)
    room = Room(layout, options, costs, *sizes, options.max_gpu_memory or 0, host_nbytes=spare_room(None))
    assert found.options.ahead == fastest_ahead(layout, options, spare_room(None) - host_nbytes, costs, room.step_s)


def test_a_limit_above_what_this_machine_has_is_a_limit_only_elsewhere(tmp_path: Path) -> None:
    """Here a run puts on disk what has no room, so a dry run's plan does."""
    large = {"model_name_or_path": str(MODEL.parent / "Llama-3.1-70B"), "tile_numel": 2**27, "update_ahead": "none"}
    given = {**large, "max_host_memory": "1000TiB", "offload_dir": str(tmp_path / "tier")}
    here, away = planned(elsewhere=False, **given), planned(**given)
    assert not away.budget.disk and here.budget.disk_nbytes > 0
