"""A rerun that leaves out the last matrix product has the plain rerun's gradients, bit for bit."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, VOCAB
from slideformer.model.decoder import Decoder
from slideformer.model.tail import TAILS, find_tail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", TAILS)
def test_gradients_do_not_need_the_last_product(family: str, dtype: torch.dtype) -> None:
    decoder = Decoder(FAMILIES[family](True), dtype=dtype, tile_numel=1 << 20)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, VOCAB, (2, 12), generator=generator)
    table = torch.randn(VOCAB, decoder.hidden_size, generator=generator).to(dtype)
    hidden, call = decoder.embed(table, {}, ids, padding_row=None)
    for unit in decoder.layout.blocks:
        flat = (torch.randn(decoder.layout.units[unit].numel, generator=generator) * 0.05).to(dtype)
        grad = torch.randn(hidden.shape, generator=generator).to(dtype)
        found, values = [], []
        for run in (decoder.forward, decoder.rerun):
            params = decoder.views(unit, flat, requires_grad=True)
            x = hidden.detach().requires_grad_()
            out = run(unit, params, x, call)
            values.append(out.detach().clone())
            found.append(torch.autograd.grad(out, [x, *params.values()], grad))
        assert not torch.equal(values[0], values[1]), "the product was computed all the same"
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        after = decoder.forward(unit, decoder.views(unit, flat), hidden, call)
        assert torch.equal(after, values[0]), "the layer is whole again after the rerun"


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(TAILS)))
def test_other_families_are_rerun_whole(family: str) -> None:
    decoder = Decoder(FAMILIES[family](True), dtype=torch.float32, tile_numel=1 << 20)
    names = [p.name for p in decoder.layout.units[decoder.layout.blocks[0]].params]
    assert find_tail(decoder._model, family, names) is None
