"""Every recipe is a valid config, and its plan fits the card it is for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slideformer.cli.config_file import load_config
from slideformer.config import TrainConfig
from slideformer.engine import budget_of
from slideformer.engine.costs import ASSUMED, assumed
from slideformer.memory import Budget
from slideformer.model.decoder import Decoder
from slideformer.schedule import build_step, prove
from slideformer.train.setup import build_decoder, engine_options

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*gb.yaml"))  # test_nvme.py has the others
MODELS = Path(__file__).parent / "models"
PARAMETERS = {  # as published
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Mistral-7B-v0.3": 7_248_023_552,
}
CARDS_GB = (8, 24, 48, 80)


def model_of(recipe: Path) -> str:
    return next(name for name in PARAMETERS if recipe.name.startswith(name.lower() + "-"))


def config_of(recipe: Path, **fields: object) -> TrainConfig:
    """The recipe on the model's published config.json, for a GPU, with nothing but buffers on the device."""
    resolved = load_config(recipe)
    assert resolved.notices == ()
    always = {"model_name_or_path": str(MODELS / model_of(recipe)), "device": "cuda", "placement": "stream",
              "offload_activations": "cpu"}  # fmt: skip
    given = {name: getattr(resolved.config, name) for name in resolved.config.model_fields_set}
    return TrainConfig.model_validate({**given, **always, **fields})


def planned(config: TrainConfig) -> tuple[Decoder, Budget]:
    """As the engine decides: the output projection passes in slices where the whole of it has no room."""
    decoder = build_decoder(config, "cuda", torch.device("cpu"))
    options = replace(engine_options(config), ahead=())
    costs = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, decoder.dtype), ASSUMED["cuda"])
    sizes = {"hidden_size": decoder.hidden_size, "dtype": decoder.dtype}
    whole, sliced = (replace(options, sliced_head=sliced) for sliced in (False, True))
    budget = budget_of(decoder.layout, whole, **sizes, costs=costs)
    if budget.device_nbytes > config.max_gpu_memory:
        budget = budget_of(decoder.layout, sliced, **sizes, costs=costs)
    return decoder, budget


def test_there_is_one_for_every_model_and_card() -> None:
    expected = {f"{name.lower()}-{card}gb.yaml" for name in PARAMETERS for card in CARDS_GB}
    assert {recipe.name for recipe in RECIPES} == expected


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_card(recipe) -> None:
    config = config_of(recipe)
    card = int(re.search(r"-(\d+)gb", recipe.name)[1])
    limit = config.max_gpu_memory
    assert 0.85 * card * 1e9 < limit < 0.97 * card * 2**30
    # Beyond two micro-batches the device takes nothing more, and the plan is long.
    few = min(config.gradient_accumulation_steps, 2)  # and large tiles make it shorter still
    decoder, budget = planned(config_of(recipe, gradient_accumulation_steps=few, tile_numel=2**26))
    assert decoder.layout.numel == PARAMETERS[model_of(recipe)]
    assert budget.device_nbytes <= limit
    text = recipe.read_text()
    told = float(re.search(r"Plan on (\d+) GiB of host memory", text)[1])
    hidden = decoder.hidden_size * 2 * (len(decoder.layout.blocks) + 1) * config.max_length
    rest = config.rows_per_step - few * config.per_device_train_batch_size
    assert told == pytest.approx((budget.host_nbytes + rest * hidden) / 2**30, rel=0.05)
    assert text.count(recipe.name) == 1
    assert f"output_dir: runs/{recipe.stem}" in text


@pytest.mark.parametrize("name", ["llama-3.2-1b-8gb", "qwen3-4b-24gb"])
def test_the_step_of_a_recipe_is_proven(name) -> None:
    config = config_of(next(recipe for recipe in RECIPES if recipe.stem == name))
    decoder = build_decoder(config, "cuda", torch.device("cpu"))
    options = replace(engine_options(config), ahead=(), saved_on_device=0, sliced_head=False)
    step = options.step_options(decoder.layout, decoder.dtype)
    prove(build_step(decoder.layout, step), decoder.layout, step)


def test_plan_and_dry_run_commands_of_the_recipes_say_what_they_are() -> None:
    for recipe in RECIPES:
        commands = re.findall(r"#   (.*)", recipe.read_text())
        folder = load_config(recipe).config.model_name_or_path
        assert commands[0].startswith("hf download ") and commands[0].endswith(f" --local-dir {folder}")
        assert commands[1] == f"slideformer train --dry-run recipes/{recipe.name}"
