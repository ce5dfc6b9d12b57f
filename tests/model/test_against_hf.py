"""Every family, unit by unit, against its own whole forward and backward on the same weights: bit for bit."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, PAD, VOCAB, random_model
from model.unit_by_unit import flats_of, run_units, run_whole
from slideformer.model.decoder import Decoder

FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def batch(seed: int = 0, rows: int = 3, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels; the rows after the first end in padding tokens, which are no targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    for row in range(1, rows):
        ids[row, length - 3 * row :] = PAD
        labels[row, length - 3 * row :] = -100
    return ids, labels


@FAMILY
@TIED
@DTYPE
def test_against_hf_loss_logits_and_gradients_are_bit_equal(family: str, tied: bool, dtype: torch.dtype) -> None:
    config = FAMILIES[family](tied)
    decoder = Decoder(config, dtype=dtype, tile_numel=1000)
    model = random_model(config, dtype=dtype, attn_implementation=decoder.attn_implementation)
    ids, labels = batch()
    whole = run_whole(model, ids, labels)
    units = run_units(decoder, flats_of(decoder, model.state_dict()), ids, labels)
    assert torch.equal(units.logits, whole.logits)
    assert torch.equal(units.loss, whole.loss)
    assert set(units.grads) == {p.name for u in decoder.layout.units for p in u.params} == set(whole.grads)
    for name, grad in whole.grads.items():
        assert grad.any(), f"{name} has no gradient: the test would not see it go missing"
        assert torch.equal(units.grads[name], grad), name


def tolerance(decoder: Decoder) -> float:
    """For fp32 sums in another order: sqrt(n) * 2^-24 per sum of n <= 96 terms, 8 sums a block, 4 blocks, both ways.

    Four times that, because norms and caps of toy width can amplify.
    """
    assert decoder.dtype == torch.float32
    return 96**0.5 * 2**-24 * 8 * 4 * 2 * 4


@FAMILY
@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_right_padding_needs_no_mask(family: str, attention: str) -> None:
    decoder = Decoder(FAMILIES[family](False), dtype=torch.float32, tile_numel=1000, attn_implementation=attention)
    model = random_model(decoder.config, attn_implementation="eager")
    ids, labels = batch()
    mask = (ids != PAD).long()
    whole = run_whole(model, ids, labels, attention_mask=mask)
    flats = flats_of(decoder, model.state_dict())
    for given in (None, mask):
        units = run_units(decoder, flats, ids, labels, attention_mask=given)
        real = mask.bool()
        close(units.logits[real], whole.logits[real], tolerance(decoder), "logits")
        close(units.loss, whole.loss, tolerance(decoder), "loss")
        for name, grad in whole.grads.items():
            close(units.grads[name], grad, tolerance(decoder), name)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    # Gradients that are zero by symmetry (key biases) are rounding alone: 1e-3 is small beside every other one.
    scale = max(expected.abs().max().item(), 1e-3)
    assert (found - expected).abs().max().item() <= tolerance * scale, name


@FAMILY
def test_samples_of_a_pack_are_computed_as_if_alone(family: str) -> None:
    decoder = Decoder(FAMILIES[family](True), dtype=torch.float32, tile_numel=1000)
    model = random_model(decoder.config, attn_implementation="eager")
    flats = flats_of(decoder, model.state_dict())
    ids, labels = batch(rows=1, length=20)
    lengths = (9, 4, 7)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    packed = run_units(decoder, flats, ids, labels, position_ids=positions).logits
    alone = [model(part).logits for part in ids.split(lengths, dim=1)]
    close(packed, torch.cat(alone, dim=1).detach(), tolerance(decoder), "logits")
    assert not torch.allclose(packed, model(ids).logits, atol=1e-3)
