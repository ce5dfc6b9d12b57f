"""Models larger than host memory: what their plans put where adds up, and a step moves over the disk what it must.

The sizes are the published ones; tiles are large, so that a plan takes a second.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slideformer.cli.config_file import load_config
from slideformer.config import TrainConfig
from slideformer.train.plan import RunPlan, plan_run

FOLDER = Path(__file__).parents[2] / "recipes"
MODELS = {  # parameters as published, and of both vocabulary matrices
    "Llama-3.1-70B": (70_553_706_496, 2 * 128256 * 8192),
    "Mistral-Large-Instruct-2407": (122_610_069_504, 2 * 32768 * 12288),
}
GIB = 2**30


def recipe_of(model: str) -> Path:
    return FOLDER / f"{model.lower()}-24gb-nvme.yaml"


def planned(model: str, **fields: object) -> RunPlan:
    resolved = load_config(recipe_of(model))
    assert resolved.notices == ()
    given = {name: getattr(resolved.config, name) for name in resolved.config.model_fields_set}
    always = {"model_name_or_path": str(Path(__file__).parent / "models" / model), "device": "cuda"}
    return plan_run(TrainConfig.model_validate({**given, **always, "tile_numel": 2**27, **fields}), elsewhere=True)


def test_there_is_a_recipe_for_each_of_them() -> None:
    assert set(FOLDER.glob("*nvme.yaml")) == {recipe_of(model) for model in MODELS}


@pytest.mark.parametrize("program", [{}, {"max_grad_norm": 0, "update": "eager"}], ids=["deferred", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_larger_than_host_memory_fits_24_gib_256_gib_and_4_tb(model, program) -> None:
    found = planned(model, **program)
    numel, vocabulary = MODELS[model]
    layout, budget, options = found.decoder.layout, found.budget, found.options
    assert layout.numel == layout.train_numel == numel
    found.require_fit()
    assert budget.device_nbytes <= 24 * GIB and budget.host_nbytes <= 240 * GIB and budget.disk_nbytes <= 4e12
    state = ("weights", "residuals", "first moments", "second moments")
    held = sum(budget.host.get(term, 0) + budget.disk.get(term, 0) for term in state)
    assert held == pytest.approx(12 * numel, rel=1e-4)
    if not program:
        assert budget.host["waiting gradients"] == pytest.approx(2 * (numel - vocabulary // 2), rel=0.02)

    on_disk = {
        content: sum(layout.units[u].numel for c, u in options.disk if c == content) for content, _ in options.disk
    }
    moments = 4 * (on_disk["exp_avg"] + on_disk["exp_avg_sq"]) + 2 * on_disk.get("residual", 0)
    weights = 2 * on_disk.get("weight", 0)
    hidden = 2 * found.tokens_per_step * found.decoder.hidden_size
    saved = 2 * (len(layout.blocks) + 1) * hidden  # an input and a gradient a block, at most
    read, written = found.traffic
    # State once each way; weights for forward, backward and their update, but for blocks at the turn; the table's rows
    # have an update of their own.
    rows = 12 * vocabulary // 2
    assert moments + 2 * weights <= read <= moments + 3 * weights + saved + rows
    assert moments + weights <= written <= moments + weights + saved + rows
    assert found.step_s == pytest.approx((read + written) / found.rates.disk_nbytes, rel=0.01), "the disk binds"
    assert re.search(r"disk binds: (9\d|100)% of the step", found.text())
    assert not re.search(r"\de[+-]\d", found.text()), "numbers that people read have no powers of ten"
    bars = [
        line.index(line.split()[1]) for line in found.text().splitlines() if re.match(r" *[a-z_]+ [.\w]+ +\d+%$", line)
    ]
    assert len(bars) > 8 and set(bars) == {11}, "disk_write is the longest name of a lane"


@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_says_what_its_plan_says(model) -> None:
    found, text = planned(model), recipe_of(model).read_text()
    told = {
        r"takes (\d+) GiB": found.budget.disk_nbytes / GIB,
        r"moves ([\d.]+) TB": sum(found.traffic) / 1e12,
        r"(\d+) minutes at 1.75 GB/s": found.step_s / 60,
        r"writes ([\d.]+) TB": found.traffic[1] / 1e12,
    }
    words = text.replace("\n#", "")
    for pattern, value in told.items():
        assert float(re.search(pattern, words)[1]) == pytest.approx(value, rel=0.04), pattern
    assert f"--local-dir models/{model}\n" in text and f"recipes/{recipe_of(model).name}\n" in text
    assert f"output_dir: runs/{recipe_of(model).stem}" in text
