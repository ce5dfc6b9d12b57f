"""On CUDA: where two blocks have no room the window is one, by what was measured, and the run is the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from gpu.test_disk_parity import deterministic  # noqa: F401 a fixture
from slideformer.data.batches import MicroBatch
from slideformer.device.cuda import CudaDevice
from slideformer.engine import Engine, EngineOptions
from slideformer.engine.placement import MARGIN
from slideformer.model.decoder import Decoder

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pool import fill  # noqa: E402
from shapes import random_tokens  # noqa: E402

CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
"""Blocks of 116 MiB, larger than all else on the device."""

GIVEN = {"sliced_head": True, "grad_slots": 1, "weight_decay": 0.1}
LEAST = {"resident": (), "keep": (), "late": (), "saved_on_device": 0}


def run(steps: int = 3, **options: object) -> tuple[Engine, int, list[tuple[float, float]]]:
    """The closed engine, the device's peak, and losses and norms."""
    decoder = Decoder(CONFIG, dtype=torch.bfloat16, tile_numel=1 << 22, device="cuda")
    batch = [MicroBatch(t, t) for t in random_tokens(0, 2, 256, CONFIG.vocab_size).split(2)]
    found = EngineOptions(micro_batch_size=2, max_length=256, **GIVEN, **options)
    with CudaDevice() as device, Engine(decoder, device, found) as engine:
        fill(engine)
        results = [engine.step(batch, lr=1e-3) for _ in range(steps)]
        found = [(r.loss, r.grad_norm) for r in results]
        engine.synchronize()
        return engine, device.peak_nbytes(), found


@pytest.mark.parametrize(
    "program", [{"update": "eager", "max_grad_norm": 0.0}, {"update": "deferred"}], ids=["eager", "deferred"]
)
def test_one_block_is_taken_where_two_have_no_room(program, caplog):
    needs, outcomes = [], []
    for window in (1, 2):
        engine, _, found = run(**program, **LEAST, window=window)
        needs.append(engine.budget.device_nbytes)
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert needs[1] > needs[0] + 100 * 2**20
    limit = int((needs[0] + needs[1]) / 2 / (1 - MARGIN))
    assert "one block is on the device at a time" not in caplog.text
    engine, peak, found = run(**program, resident="auto", keep="auto", max_gpu_memory=limit)
    assert engine.options.window == engine.step_options.window == 1
    assert found == outcomes[0] and peak <= limit
    assert "one block is on the device at a time, since two have no room" in caplog.text
    roomy, _, found = run(**program, resident="auto", keep="auto", max_gpu_memory=limit + 150 * 2**20)
    assert roomy.options.window == 2 and found == outcomes[0]
