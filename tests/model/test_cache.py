"""Keys and values in the caller's memory: cached, a block gives what it gives without, and refuses what it cannot."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, VOCAB, random_model
from slideformer.layout import UnitKind
from slideformer.model.cache import CacheShape
from slideformer.model.decoder import Decoder, ModelRefused

ROWS, LENGTH = 2, 11


def decoder_of(family: str) -> Decoder:
    return Decoder(FAMILIES[family](True), dtype=torch.float32, tile_numel=5000)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_positions_one_after_the_other_give_the_logits_of_all_at_once(family: str):
    """In pieces of 4, 1, 1, ... positions; the second row begins with three of padding. fp32; sums in another order."""
    decoder = decoder_of(family)
    model = random_model(decoder.config, attn_implementation="eager")
    params = dict(model.named_parameters())
    layout, glue = decoder.layout, decoder.layout.find(UnitKind.GLUE)
    around = {} if glue is None else {p.name: params[p.name] for p in layout.units[glue].params}
    ids = torch.randint(6, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    memory = [torch.full((LENGTH * ROWS * decoder.cache_shape.numel,), torch.nan) for _ in layout.blocks]
    table = params[layout.units[0].params[0].name]
    weight = params[layout.units[layout.output].params[0].name]
    for start, stop in [(0, 4), *((i, i + 1) for i in range(4, LENGTH))]:
        hidden, call = decoder.embed(
            table,
            around,
            ids[:, start:stop],
            padding_row=None,
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            cache=decoder.pass_cache(start),
        )
        for unit, held in zip(layout.blocks, memory, strict=True):
            hidden = decoder.forward_cached(unit, params, hidden, call, held)
        logits = decoder.projection.logits(decoder.final(params, hidden), weight, params.get(decoder.projection.bias))
        real = mask[:, start:stop].bool()
        torch.testing.assert_close(logits[real], expected[:, start:stop][real], rtol=1e-4, atol=1e-4)


def test_the_memory_of_a_position_is_one_piece():
    """So the newest columns, and all up to them, are one copy each."""
    shape = CacheShape(FAMILIES["llama"](True))
    memory = torch.arange(5 * ROWS * shape.numel)
    view = shape.view(memory, ROWS)
    assert view.shape == (5, 2, ROWS, 2, 16)
    assert torch.equal(view[3:].flatten(), memory[3 * ROWS * shape.numel :])


def test_memory_that_is_full_and_a_call_without_memory_are_defects():
    decoder = decoder_of("llama")
    cache = decoder.pass_cache(2)
    states = torch.zeros(ROWS, 2, 1, 16)
    with pytest.raises(AssertionError, match="outside of its call"):
        cache.update(states, states, 0)
    cache.open(torch.zeros(2 * ROWS * decoder.cache_shape.numel))
    with pytest.raises(AssertionError, match="3 positions, and there is memory for 2"):
        cache.update(states, states, 0)


def test_a_model_that_keeps_something_else_is_refused():
    config = FAMILIES["qwen3"](True)
    config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(ModelRefused, match="blocks of type linear_attention, which keep something else"):
        CacheShape(config)
    decoder = decoder_of("llama")
    cache = decoder.pass_cache(0)
    cache.open(torch.zeros(1000))
    with pytest.raises(ModelRefused, match=r"keys \[2, 3, 1, 16\].*by its config there are 2 heads of 16"):
        cache.update(torch.zeros(ROWS, 3, 1, 16), torch.zeros(ROWS, 3, 1, 16), 0)
