"""The number of operations behind every TFLOP/s figure, against torch's own count of a step."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from flops import model_flops
from shapes import random_tokens

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_model_flops_are_what_torch_counts_with_causal_attention_halved(kind, tied):
    config = kind(**SIZES, tie_word_embeddings=tied)
    batch, seq = 2, 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # computes both halves
    tokens = random_tokens(0, batch, seq, config.vocab_size)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    scores_and_values = 2 * 2 * config.num_attention_heads * config.head_dim * seq
    masked_half = 3 * batch * seq * config.num_hidden_layers * scores_and_values / 2
    rotary_table = config.head_dim * seq  # positions times frequencies: some versions make it a matrix product
    extra = counter.get_total_flops() - (model_flops(config, batch, seq) + masked_half)
    assert extra in (0, rotary_table)
