"""Text on a GPU: streamed, resident or placed, the tokens are those of the model's own generate(), within the plan."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from families import FAMILIES, VOCAB, random_model  # noqa: E402
from shapes import random_pieces, random_tokens, shape  # noqa: E402
from slideformer.device.cuda import CudaDevice  # noqa: E402
from slideformer.engine.generation import Generation  # noqa: E402
from slideformer.engine.generator import GenerationEngine, GenerationOptions  # noqa: E402
from slideformer.model.decoder import Decoder  # noqa: E402
from slideformer.model.sampling import Sampling  # noqa: E402

GIB = 2**30
LENGTHS, NEW = (19, 4, 7, 7, 2), 12


def fill(engine: GenerationEngine, params: dict[str, torch.Tensor]) -> None:
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            engine.write(index, unit.offsets[param.name], params[param.name].detach().float().cpu().reshape(-1))


@pytest.mark.parametrize("placement", [(), (0, 2, 5), "all", "auto"], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "phi3", "qwen3"])
def test_tokens_are_those_of_the_models_own_generate(family: str, placement: object):
    """fp32, the model's own blocks, weights far apart so that rounding decides nothing; on the CPU by transformers."""
    model = random_model(FAMILIES[family](True), attn_implementation="eager")
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(3)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(6, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        expected.append(tuple(out[0, len(prompt) :].tolist()))
    with CudaDevice() as device:
        decoder = Decoder(
            FAMILIES[family](True), dtype=torch.float32, tile_numel=5000, kernels="torch", device=device.torch_device
        )
        options = GenerationOptions(resident=placement, micro_tokens=40)
        with GenerationEngine(decoder, device, options, prompt_lengths=LENGTHS, max_new_tokens=NEW) as engine:
            assert engine.shape.micro_batches > 1
            fill(engine, dict(model.named_parameters()))
            assert engine.generate(prompts, Sampling(max_new_tokens=NEW)).tokens == tuple(expected)
            drawn = Sampling(max_new_tokens=NEW, temperature=1.0, top_k=50, seed=1)
            assert engine.generate(prompts, drawn).tokens == engine.generate(prompts, drawn).tokens


def big(device: CudaDevice) -> Decoder:
    return Decoder(
        shape("llama-3.2-1b"), dtype=torch.bfloat16, tile_numel=1 << 22, kernels="auto", device=device.torch_device
    )


def random_weights(engine: GenerationEngine) -> None:
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            offset = unit.offsets[param.name]
            for piece in random_pieces(param.name, param.shape, "cuda"):
                engine.write(index, offset, piece.cpu())
                offset += piece.numel()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def tokens_of(prompts: list[list[int]], options: GenerationOptions, new: int = 16) -> tuple[tuple[int, ...], ...]:
    """And that no more device memory is taken than planned, but for 64 MiB of gaps."""
    with CudaDevice() as device:
        lengths = [len(prompt) for prompt in prompts]
        with GenerationEngine(big(device), device, options, prompt_lengths=lengths, max_new_tokens=new) as engine:
            random_weights(engine)
            found = engine.generate(prompts, Sampling(max_new_tokens=new)).tokens
            assert device.peak_nbytes() <= engine.budget.device_nbytes + (64 << 20)
    torch.cuda.empty_cache()
    return found


def test_streamed_in_bf16_with_kernels_says_what_the_resident_model_says():
    """The 1B shape, greedy. Streamed, resident and placed in 2 GiB are one computation. First tokens of most prompts
    are those of transformers in bf16, where other orders of sums may decide between two that are close."""
    prompts = random_tokens(0, 8, 64, 128256).tolist()
    streamed = tokens_of(prompts, GenerationOptions(resident=()))
    assert tokens_of(prompts, GenerationOptions(resident="all")) == streamed
    assert tokens_of(prompts, GenerationOptions(max_gpu_memory=2 * GIB)) == streamed
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape("llama-3.2-1b"), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(
                torch.cat([p.flatten() for p in random_pieces(name, tuple(param.shape), "cuda")]).view_as(param)
            )
    ids = torch.tensor(prompts, device="cuda")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, eos_token_id=None)
    same = sum(int(a[0] == b) for a, b in zip(streamed, out[:, -1].tolist(), strict=True))
    assert same >= 6, f"{same} of 8 first tokens are those of transformers"


def test_keys_and_values_that_come_from_the_host_change_no_token():
    """Prompts of unequal lengths, so that there is a mask; 5 of the blocks' keys and values stay on the device."""
    prompts = [p[: 200 - 30 * i] for i, p in enumerate(random_tokens(0, 4, 200, 128256).tolist())]
    expected = tokens_of(prompts, GenerationOptions(resident=()), new=8)
    with CudaDevice() as device:
        lengths = [len(prompt) for prompt in prompts]
        with GenerationEngine(
            big(device), device, GenerationOptions(resident=()), prompt_lengths=lengths, max_new_tokens=8
        ) as engine:
            random_weights(engine)
            options = replace(engine.pass_options, cached_on_device=5)
            made = Generation(engine.decoder, device, engine.kernels, engine.state, engine.shape, options, {})
            assert made.run(prompts, Sampling(max_new_tokens=8)).tokens == expected
