"""Training takes the device memory that was planned, within a limit and without one, and no more than the limit."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pool import fill  # noqa: E402
from shapes import random_tokens, shape  # noqa: E402
from slideformer.data.batches import MicroBatch  # noqa: E402
from slideformer.device.cuda import CudaDevice  # noqa: E402
from slideformer.engine import Engine, EngineOptions  # noqa: E402
from slideformer.model.decoder import Decoder  # noqa: E402

GIB = 2**30
OVER = 1.05

CASES = {
    "streamed": {"resident": (), "update": "eager", "max_grad_norm": 0.0},
    "spilled, clipping, two micro-batches": {"resident": (), "saved_on_device": 0, "micro_batches": 2},
    "placed within 6 GiB": {"resident": "auto", "keep": "auto", "max_gpu_memory": 6 * GIB},
    "placed within 9 GiB, eager": {
        "resident": "auto",
        "keep": "auto",
        "max_gpu_memory": 9 * GIB,
        "update": "eager",
        "max_grad_norm": 0.0,
    },
    "all resident, blocks run twice": {"resident": "all"},
    "placed on the whole card": {"resident": "auto", "keep": "auto", "update": "eager", "max_grad_norm": 0.0},
}


def _a_product() -> None:
    """A matrix library may have been used before: what it keeps is in the plan all the same."""
    square = torch.zeros(512, 512, device="cuda")
    (square @ square).sum().item()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_takes_the_device_memory_that_was_planned(case: str) -> None:
    settings = CASES[case]
    config, micro = shape("llama-3.2-1b", num_layers=8), settings.get("micro_batches", 1)
    batch = [MicroBatch(t, t) for t in random_tokens(0, 8 * micro, 1024, config.vocab_size).split(8)]
    options = EngineOptions(micro_batch_size=8, max_length=1024, **settings)
    with CudaDevice() as device:
        _a_product()
        decoder = Decoder(config, dtype=torch.bfloat16, tile_numel=16 << 20, device="cuda")
        with Engine(decoder, device, options) as engine:
            fill(engine)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            losses = [engine.step(batch, lr=1e-4).loss for _ in range(3)]
            engine.synchronize()
            planned, taken = engine.budget.device_nbytes, device.peak_nbytes()
    del engine, decoder
    gc.collect()
    torch.cuda.empty_cache()
    assert losses[2] < losses[0]
    assert taken <= planned <= OVER * taken, f"{planned / GIB:.3f} GiB planned, {taken / GIB:.3f} taken"
    assert planned <= settings.get("max_gpu_memory", planned)
