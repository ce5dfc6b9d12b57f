"""Variable-length flash attention, where transformers asks for attention, against float64 sample by sample.

bf16: scores are rounded products of width D summed in fp32; the softmax's weights are rounded to bf16 before they meet
the values. So an output is off by no more than a few roundings to bf16 of the weighted values' absolute sum.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from families import FAMILIES, VOCAB, random_model
from model.unit_by_unit import flats_of
from slideformer.model.decoder import Decoder
from slideformer.model.packed_attention import Samples, attention_by_sample, packing_of, samples_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

LENGTHS = ((700, 1, 123, 200), (1024,))


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float) -> torch.Tensor:
    """float64 [B, S, heads, D]; every sample with a mask of its own."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for n in lengths:
            part = slice(at, at + n)
            scores = q[row, :, part] @ k[row, :, part].transpose(1, 2) * scale
            behind = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
            seen = (behind >= 0) & (behind < (window or n))
            out[row, :, part] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[row, :, part]
            at += n
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_output_and_gradients_are_those_of_each_sample_alone(size, heads, window):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, 1024, n, size, generator=generator, device="cuda").bfloat16().transpose(1, 2)
        for n in (*heads, heads[1], heads[0])
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    samples = samples_of(positions().cuda(), packing_of(positions()))
    samples = Samples(samples.packing, samples.starts, window)
    module = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=True)
    out, _ = attention_by_sample(module, *leaves, samples, scaling=size**-0.5)
    found = torch.autograd.grad(out, leaves, grad.transpose(1, 2))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = exact(*wide, window, size**-0.5)
    grads = torch.autograd.grad(expected, wide, grad.transpose(1, 2).double())
    # 2**-8 is one rounding to bf16; weighted values are at most ~4 in size (normal values): absolute
    assert (out.double() - expected).abs().max() <= 4 * 4 * 2.0**-8
    for mine, theirs, name in zip(found, grads, "qkv", strict=True):
        assert (mine.double() - theirs).norm() <= 4 * 2.0**-8 * theirs.norm(), name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_packed_forward_waits_for_nothing_and_equals_the_mask(family):
    """bf16 weights of toy width; within what bf16 roundings do over four blocks: 2**-8, sqrt of 4 x 8 of them."""
    config = FAMILIES[family](True)
    model = random_model(config, dtype=torch.bfloat16)
    ids = torch.randint(6, VOCAB, (2, 20), device="cuda")
    given = torch.stack([torch.cat([torch.arange(9), torch.arange(11)]), torch.arange(20)])
    hidden = []
    for attention in ("auto", "sdpa"):
        decoder = Decoder(
            config, dtype=torch.bfloat16, tile_numel=1000, attn_implementation=attention, device="cuda", kernels="auto"
        )
        flats = [flat.cuda() for flat in flats_of(decoder, model.state_dict())]
        table = flats[0].view(VOCAB, decoder.hidden_size)
        packing, on_gpu = packing_of(given), given.cuda()
        for warm in (True, False):  # the first call compiles
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            try:
                x, call = decoder.embed(table, {}, ids, padding_row=None, position_ids=on_gpu, packing=packing)
                for unit in decoder.layout.blocks:
                    x = decoder.forward(unit, decoder.views(unit, flats[unit]), x, call)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        hidden.append(x.double())
    assert (hidden[0] - hidden[1]).norm() <= 2.0**-8 * 32**0.5 * hidden[1].norm()


def test_samples_in_one_row_have_the_values_they_have_in_rows_of_their_own():
    """A block of Llama-3.2-1B's sizes, 32 samples of 256 tokens: only attention's order of sums differs. One rounding
    to bf16 (2**-8) of the attention's output, then of the block's; and again in backward, four products deep."""
    from shapes import shape

    decoder = Decoder(
        shape("llama-3.2-1b", num_layers=1), dtype=torch.bfloat16, tile_numel=1 << 24, device="cuda", kernels="triton"
    )
    unit, width = decoder.layout.blocks[0], decoder.hidden_size
    generator = torch.Generator("cuda").manual_seed(0)
    flat = (torch.randn(decoder.layout.units[unit].numel, generator=generator, device="cuda") * 0.02).bfloat16()
    hidden, grad = (torch.randn(32, 256, width, generator=generator, device="cuda").bfloat16() for _ in range(2))
    found = []
    for rows in (32, 1):
        positions = torch.arange(256).repeat(32).view(rows, -1) if rows == 1 else None
        ids = torch.zeros(rows, 8192 // rows, dtype=torch.int64, device="cuda")
        _, call = decoder.embed(
            torch.zeros(1, width, device="cuda").bfloat16(), {}, ids, padding_row=None,
            position_ids=None if positions is None else positions.cuda(),
            packing=None if positions is None else packing_of(positions),
        )  # fmt: skip
        x = hidden.view(rows, -1, width).clone().requires_grad_()
        params = decoder.views(unit, flat, requires_grad=True)
        out = decoder.forward(unit, params, x, call)
        grads = torch.autograd.grad(out, [x, *params.values()], grad.view(rows, -1, width))
        found.append([out.flatten().double(), *(g.flatten().double() for g in grads)])
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        roundings = 2 if index == 0 else 8
        assert (one - other).norm() <= roundings * 2.0**-8 * other.norm(), index
