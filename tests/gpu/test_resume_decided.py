"""On CUDA: a run whose output projection passed in slices, for the room, goes on so on a card that has room for all of
it, bit for bit; and the other way round it is told.

Deterministic kernels, since two runs differ otherwise. 1B widths, four blocks: 6 GB a checkpoint.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu.saved_model import save, write_rows  # noqa: E402
from shapes import shape  # noqa: E402
from slideformer.config import TrainConfig  # noqa: E402
from slideformer.device.cuda import CudaDevice  # noqa: E402
from slideformer.engine.settle import budgets_of, settle  # noqa: E402
from slideformer.native import load  # noqa: E402
from slideformer.train import trainer  # noqa: E402
from slideformer.train.console import PlainConsole  # noqa: E402
from slideformer.train.setup import build_decoder, engine_options  # noqa: E402

SLICES, WHOLE = "the output projection in slices", "the output projection whole"
SHORT_OF_ROOM_NBYTES = 256 << 20  # more than two measurements of working memory differ by; the slices save 2 GB


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(trainer, "check_parity", lambda *args, **settings: None)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Of a config, all but where it ends."""
    folder = tmp_path_factory.mktemp("model")
    config = shape("llama-3.2-1b")
    config.num_hidden_layers = 4
    save(config, folder)
    rows = folder / "rows.jsonl"
    write_rows(rows)
    sizes = {"max_length": 512, "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-4}
    saves = {"save_steps": 2, "save_total_limit": None}
    return {"model_name_or_path": str(folder), "dataset": str(rows), "device": "cuda", **sizes, **saves}


def run(fields: dict[str, object], output_dir: Path, **changes: object) -> str:
    """What was told."""
    out = io.StringIO()
    trainer.train(TrainConfig(**{**fields, "output_dir": str(output_dir), **changes}), PlainConsole(out))
    return out.getvalue()


def short_of_room_for_the_whole(fields: dict[str, object]) -> dict[str, str]:
    config, kernels = TrainConfig(**fields, output_dir="nowhere"), load(4)
    options = replace(engine_options(config), sliced_head=False, resident=(), keep=(), saved_on_device=0, late=())
    try:
        with CudaDevice() as device:
            decoder = build_decoder(config, "cuda", device.torch_device)
            found = settle(options, decoder, device, kernels)
    finally:
        kernels.close()
    smallest = replace(found.options, window=1)
    nbytes = budgets_of(decoder, found.costs).of(smallest).device_nbytes - SHORT_OF_ROOM_NBYTES
    return {"max_gpu_memory": f"{nbytes / 2**20}MiB"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.timeout(600)
def test_a_head_in_slices_goes_on_in_slices_where_the_whole_has_room(fields, tmp_path) -> None:
    tight = short_of_room_for_the_whole(fields)
    assert SLICES in run(fields, tmp_path / "tight", **tight)
    from_there = {"resume_from_checkpoint": str(tmp_path / "tight/checkpoint-2")}
    told = run(fields, tmp_path / "roomy", **from_there)
    assert SLICES in told and "last bits" not in told
    assert files_of(tmp_path / "roomy/checkpoint-4") == files_of(tmp_path / "tight/checkpoint-4")
    assert "multiprocessors" in json.loads((tmp_path / "roomy/checkpoint-4/trainer.json").read_text())["bits"]["GPU"]


@pytest.mark.timeout(600)
def test_a_whole_head_that_has_no_room_any_more_is_told(fields, tmp_path) -> None:
    assert WHOLE in run(fields, tmp_path / "roomy")
    from_there = {"resume_from_checkpoint": str(tmp_path / "roomy/checkpoint-2")}
    told = run(fields, tmp_path / "tight", **from_there, **short_of_room_for_the_whole(fields))
    assert SLICES in told
    assert "warning: what checkpoint-2 was made with has no room here, so the last bits may differ" in told
