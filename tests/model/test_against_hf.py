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
