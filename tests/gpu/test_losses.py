"""Twenty steps of SmolLM2-135M's shape on the GPU: Triton's kernels against the model's own code, weights streamed.

No two ways to compute in bf16 give the same losses, so what they may differ by is measured, in the same test, on the
model's own code alone:
  rounding: how far its bf16 losses are from its fp32 losses. Our kernels round less often than it does (a norm, a
    rotation or a gated product is in fp32 inside and rounded once), so they are no further from fp32 than that;
  order: how far its bf16 losses are from those with the head in slices, which is the same mathematics and the same
    roundings, summed in another order. It shows how fast a difference in the last bits grows in training.
Two runs that are each within `rounding` of fp32 are within twice that of each other, and each is a draw, not a bound:
so half of that again, and never less than `order`. To both comes one unit of bf16 in the losses (2^-8 of ~10), averaged
over the ~2,000 tokens of a step.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from slideformer.data.batches import MicroBatch
from slideformer.device.cuda import CudaDevice
from slideformer.engine import Engine, EngineOptions
from slideformer.model.decoder import Decoder

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from shapes import random_tokens, random_weight  # noqa: E402

ROWS, LENGTH, STEPS = 4, 512, 20
UNIT = 10 * 2.0**-8 / (ROWS * LENGTH) ** 0.5


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )


@cache
def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return random_weight(name, shape, "cuda").cpu().flatten()


def losses(dtype: torch.dtype, kernels: str, *, sliced_head: bool = False) -> torch.Tensor:
    """Of every step. The rows of two steps alternate, so that there is something to learn."""
    decoder = Decoder(config(), dtype=dtype, tile_numel=8 << 20, device="cuda", kernels=kernels)
    if kernels == "triton":
        assert set(decoder.kernels.values()) == {"triton"}
    fixed = {"sliced_head": sliced_head, "saved_on_device": None, "ahead": (), "late": ()}
    options = EngineOptions(micro_batch_size=ROWS, max_length=LENGTH, window=2, update="deferred", **fixed)
    batches = [[MicroBatch(t, t)] for t in (random_tokens(i, ROWS, LENGTH, 49152) for i in range(2))]
    with CudaDevice() as device, Engine(decoder, device, options) as engine:
        for index, unit in enumerate(decoder.layout.units):
            for param in unit.params:
                engine.write(index, unit.offsets[param.name], weight(param.name, param.shape))
        found = [engine.step(batches[i % 2], lr=3e-4) for i in range(STEPS)]
        return torch.tensor([result.loss for result in found], dtype=torch.float64)


@pytest.mark.timeout(180)
def test_losses_with_our_kernels_are_those_of_the_models_own_code():
    exact, own = losses(torch.float32, "torch"), losses(torch.bfloat16, "torch")
    sliced = losses(torch.bfloat16, "torch", sliced_head=True)
    ours = losses(torch.bfloat16, "triton")
    assert exact[0] - exact[-1] >= 1.0, "nothing was learned, so nothing was compared"
    # What was off stays off: a step's yardstick is the most that was seen up to it.
    rounding, order = ((own - other).abs().cummax(0).values for other in (exact, sliced))
    allowed = torch.maximum(3 * rounding, order) + UNIT
    report = f"ours {ours.tolist()}, own {own.tolist()}, rounding {rounding.tolist()}, order {order.tolist()}"
    assert bool((order > 0).any()), report
    assert bool(((ours - own).abs() <= allowed).all()), report
    assert bool(((ours - exact).abs() <= 2 * rounding + UNIT).all()), report
