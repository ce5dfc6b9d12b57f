"""Streamed training on CUDA equals training with everything resident, bit for bit.

The reference is the sequential loop of tests/engine on the same GPU, with deterministic algorithms on: flash
attention's backward otherwise adds with atomics, and two resident runs differ too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from sequential import Sequential  # noqa: E402

from shapes import random_tokens, random_weight, shape  # noqa: E402
from slideformer.data.batches import MicroBatch  # noqa: E402
from slideformer.device.cuda import CudaDevice  # noqa: E402
from slideformer.engine import Engine, EngineOptions  # noqa: E402
from slideformer.model.decoder import Decoder  # noqa: E402


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def fill(target, decoder: Decoder) -> None:
    for index, unit in enumerate(decoder.layout.units):
        for param in unit.params:
            values = random_weight(param.name, param.shape, "cuda").cpu().flatten()
            target.write(index, unit.offsets[param.name], values)


CASES = {
    "eager": {"update": "eager", "max_grad_norm": 0.0},
    "deferred": {"update": "deferred", "max_grad_norm": 1.0},
    "ahead": {"update": "deferred", "max_grad_norm": 10.0, "ahead": (0, 1, 2, 5, 9)},
    "ahead, every step clipped": {"update": "deferred", "max_grad_norm": 0.01, "ahead": (0, 1, 2, 5, 9)},
    "all ahead, every step clipped": {"update": "deferred", "max_grad_norm": 0.01, "ahead": tuple(range(18))},
    "some resident": {"update": "eager", "max_grad_norm": 0.0, "resident": (0, 1, 2, 3, 17), "keep": (1, 3)},
    "late updates, sliced head": {
        "update": "eager",
        "max_grad_norm": 0.0,
        "late": (3, 5, 7, 9, 11, 13),
        "sliced_head": True,
        "window": 1,
    },
    "all resident": {
        "update": "deferred",
        "max_grad_norm": 1.0,
        "micro_batches": 2,
        "resident": tuple(range(18)),
        "keep": (2, 3, 4, 5),
    },
    "spilled, two micro-batches": {
        "update": "deferred",
        "max_grad_norm": 1.0,
        "micro_batches": 2,
        "saved_on_device": 3,
    },
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["llama-3.2-1b"])
def test_streamed_equals_resident(name: str, case: str) -> None:
    settings = CASES[case]
    micro = settings.get("micro_batches", 1)
    config = shape(name)
    options = EngineOptions(micro_batch_size=2, max_length=512, weight_decay=0.1, **{"window": 2, **settings})
    tokens = random_tokens(0, 2 * micro, 512, config.vocab_size)
    batch = [MicroBatch(t, t) for t in tokens.split(2)]
    make = lambda: Decoder(config, dtype=torch.bfloat16, tile_numel=8 << 20, device="cuda")  # noqa: E731
    with CudaDevice() as device, Engine(make(), device, options) as engine:
        fill(engine, engine.decoder)
        results = [engine.step(batch, lr=1e-4) for _ in range(5)]
        found = [(r.loss, r.grad_norm) for r in results]
        engine.synchronize()
        reference = Sequential(make(), engine.options, "cuda")  # with the head as it was decided, whole or in slices
        fill(reference, reference.decoder)
        expected = [reference.step(batch, 1e-4) for _ in range(5)]
        assert found == expected
        assert found[0][0] - found[-1][0] >= 0.5
        for index, unit in enumerate(engine.layout.units):
            for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
                held, expected = engine.state.planes(index), getattr(reference, name)[index]
                assert torch.equal(getattr(held, name).cpu(), expected.cpu()), f"{unit.name} {name}"
