"""Samples that share a row are computed as if alone, without a mask for the row."""

from __future__ import annotations

import logging

import pytest
import torch

from families import FAMILIES, VOCAB, random_model
from model.unit_by_unit import flats_of, run_units
from slideformer.errors import BadInput
from slideformer.model import packed_attention
from slideformer.model.decoder import Decoder
from slideformer.model.packed_attention import Samples, packing_of, samples_of

LENGTHS = ((9, 1, 4, 6), (3, 17))


def positions_of(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(6, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    return ids, positions_of(*LENGTHS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_a_samples_logits_are_those_it_has_alone(family: str, attention: str):
    """By sample (auto, where scores are not soft-capped), and by a mask (sdpa, eager)."""
    if attention == "sdpa" and FAMILIES[family](True).model_type == "gemma2":
        attention = "eager"  # sdpa leaves soft-capping out
    decoder = Decoder(FAMILIES[family](True), dtype=torch.float32, tile_numel=1000, attn_implementation=attention)
    model = random_model(decoder.config, attn_implementation="eager")
    ids, positions = batch()
    packed = run_units(decoder, flats_of(decoder, model.state_dict()), ids, ids.clone(), position_ids=positions)
    alone = [
        torch.cat([model(part[None]).logits[0] for part in row.split(lengths)])
        for row, lengths in zip(ids, LENGTHS, strict=True)
    ]
    assert (packed.logits - torch.stack(alone)).abs().max() <= 1e-4
    assert (packed.logits - model(ids).logits).abs().max() > 1e-2, "nothing was kept apart"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_gradients_are_those_of_the_mask(family: str):
    """fp32 sums in another order: sqrt(96) terms, 8 sums a block, 4 blocks, both ways, and four times that."""
    config = FAMILIES[family](True)
    flats = None
    found = []
    for attention in ("auto", "sdpa"):
        decoder = Decoder(config, dtype=torch.float32, tile_numel=1000, attn_implementation=attention)
        flats = flats or flats_of(decoder, random_model(config).state_dict())
        ids, positions = batch()
        found.append(run_units(decoder, flats, ids, ids.clone(), position_ids=positions).grads)
    tolerance = 96**0.5 * 2**-24 * 8 * 4 * 2 * 4
    for name, expected in found[1].items():
        error = (found[0][name] - expected).abs().max()
        assert error <= tolerance * max(float(expected.abs().max()), 1e-3), name


def test_no_mask_is_made(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a mask was made")

    decoder = Decoder(FAMILIES["gemma3"](True), dtype=torch.float32, tile_numel=1000)
    monkeypatch.setattr(packed_attention, "sdpa_mask", refuse)
    ids, positions = batch()
    table = torch.randn(VOCAB, decoder.hidden_size)
    _, call = decoder.embed(table, {}, ids, padding_row=None, position_ids=positions)
    masks = [kwargs["attention_mask"] for kwargs in call.kwargs]
    assert all(isinstance(mask, Samples) for mask in masks)
    assert [mask.window for mask in masks] == [5, None, 5, None]


def test_a_window_is_as_wide_as_the_models():
    """A query sees the window's tokens, itself counted in."""
    module, samples = torch.nn.Identity(), samples_of(positions_of((8,)), packing_of(positions_of((8,))))
    q, k = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)
    v = torch.eye(8)[None, None]
    seen = packed_attention.attention_by_sample(
        module, q, k, v, Samples(samples.packing, samples.starts, window=3), scaling=1.0
    )[0][0, :, 0]
    expected = torch.tensor([[float(0 <= i - j < 3) for j in range(8)] for i in range(8)])
    assert torch.allclose(seen, expected / expected.sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        (positions_of((3, 2)), (0, 3, 5)),
        (positions_of((5,), (1, 4)), (0, 5, 6, 10)),
        (torch.tensor([[4, 5, 0, 1]]), (0, 2, 4)),
        (torch.tensor([[0, 0, 0]]), (0, 1, 2, 3)),
        (torch.tensor([[0, 1, 7, 8]]), (0, 2, 4)),
    ],
)
def test_samples_begin_where_positions_do_not_go_on(positions: torch.Tensor, starts: tuple[int, ...]):
    packing = packing_of(positions)
    samples = samples_of(positions, packing)
    assert packing.starts == starts and tuple(samples.starts.tolist()) == starts
    assert samples.starts.dtype is torch.int32
    assert packing.longest == max(b - a for a, b in zip(starts, starts[1:], strict=False))


def test_a_mask_that_is_too_large_is_refused_and_a_small_one_is_told(monkeypatch, caplog):
    decoder = Decoder(FAMILIES["gemma2"](True), dtype=torch.float32, tile_numel=1000)
    ids, positions = batch()
    table = torch.randn(VOCAB, decoder.hidden_size)
    packed_attention._notice.cache_clear()
    with caplog.at_level(logging.WARNING):
        decoder.embed(table, {}, ids, padding_row=None, position_ids=positions)
        decoder.embed(table, {}, ids, padding_row=None, position_ids=positions)
    told = "packed rows are kept apart by a mask of max_length x max_length with eager attention; attn_implementation"
    assert [record.message.startswith(told) for record in caplog.records] == [True]
    monkeypatch.setattr(packed_attention, "MAX_MASK_NBYTES", 2 * 20 * 20 * 4 - 1)
    with pytest.raises(BadInput, match="at most 0 are made: lower max_length or .*, set packing: false, or use attn_"):
        decoder.embed(table, {}, ids, padding_row=None, position_ids=positions)


def test_attention_that_is_more_than_causal_is_refused_by_sample():
    module, x = torch.nn.Identity(), torch.zeros(1, 1, 8, 4)
    samples = samples_of(positions_of((8,)), packing_of(positions_of((8,))))
    for more in ({"softcap": 2.0}, {"dropout": 0.1}, {"position_bias": x}):
        with pytest.raises(BadInput, match="dropout, soft-capped scores or a position bias"):
            packed_attention.attention_by_sample(module, x, x, x, samples, **more)
    with packed_attention_in_hand(samples), pytest.raises(BadInput, match="more than causal"):
        packed_attention.mask_by_sample(use_vmap=True)


def packed_attention_in_hand(samples: Samples):
    from slideformer.model.packing import packing_known

    return packing_known(True, samples)


def test_what_works_by_sample():
    llama = FAMILIES["llama"](True)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert packed_attention.works_by_sample(llama, cpu, torch.float32)
    assert packed_attention.works_by_sample(llama, gpu, torch.bfloat16)
    assert not packed_attention.works_by_sample(llama, gpu, torch.float32), "flash attention has no fp32"
    llama.head_dim = 512
    assert not packed_attention.works_by_sample(llama, gpu, torch.bfloat16)
