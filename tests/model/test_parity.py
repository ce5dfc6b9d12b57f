"""The parity check lets every family pass exactly, and stops what the recorders cannot see."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from families import FAMILIES
from model.odd_models import ODD, odd_config
from model.test_against_hf import FAMILY
from slideformer.model.decoder import Decoder, ModelRefused
from slideformer.model.parity import check_parity, small_copy


@FAMILY
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_family_agrees_exactly(family: str, tied: bool) -> None:
    found = check_parity(FAMILIES[family](tied))
    assert found.worst == 0.0 < found.tolerance < 1e-4


@pytest.mark.parametrize("oddity", sorted(name for name, odd in ODD.items() if odd.parity))
def test_what_recorders_cannot_see_is_stopped_by_comparing(oddity: str) -> None:
    Decoder(odd_config(oddity), dtype=torch.float32, tile_numel=1000)
    with pytest.raises(ModelRefused) as error:
        check_parity(odd_config(oddity))
    start = f"odd, run unit by unit, does not compute what the model's own forward does: {ODD[oddity].parity}"
    assert str(error.value).startswith(start)
    assert str(error.value).endswith("it would be trained wrong: choose another model.")


@pytest.mark.parametrize("oddity", ["", "tuple"])
def test_the_same_toy_without_a_fault_passes(oddity: str) -> None:
    assert check_parity(odd_config(oddity)).worst == 0.0


def test_dropout_is_refused_or_disabled_here_too() -> None:
    with pytest.raises(ModelRefused, match="gpt2 trains with dropout"):
        check_parity(GPT2Config())
    assert check_parity(GPT2Config(), disable_dropout=True).worst == 0.0


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    check_parity(FAMILIES["llama"](True))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_copy_keeps_one_period_of_block_types_the_head_size_and_the_grouping() -> None:
    config = Gemma3TextConfig(
        hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, intermediate_size=15360
    )
    small = small_copy(config)
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention"] and small.num_hidden_layers == 6
    assert (small.head_dim, small.num_attention_heads, small.num_key_value_heads) == (config.head_dim, 4, 2)
    assert (small.hidden_size, small.sliding_window, small.vocab_size) == (960, 4, 97)
    assert config.num_hidden_layers == 48 and len(config.layer_types) == 48


@pytest.mark.parametrize(
    ("limit_s", "shape"),
    [
        (2.0, {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}),
        (8.0, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}),
    ],
    ids=["SmolLM2-135M", "8B"],
)
def test_real_widths_take_little_time(limit_s: float, shape: dict[str, int]) -> None:
    config = LlamaConfig(vocab_size=49152, num_hidden_layers=30, tie_word_embeddings=True, **shape)
    start = time.process_time()
    assert check_parity(config).worst == 0.0
    assert time.process_time() - start < limit_s
