"""Floating-point operations that a training step asks for, from a model's config."""

from __future__ import annotations

from transformers import PretrainedConfig


def model_flops(config: PretrainedConfig, batch: int, seq: int) -> float:
    """Of one step on `batch` rows of `seq` tokens: 2 a multiply-add of every matrix product, times 3 for backward.

    Causal attention is counted half, the output projection is counted, what is computed twice is counted once. For
    gated models with grouped queries (Llama, Mistral, Qwen), which are those that benchmarks/shapes.py knows.
    """
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    projections = config.hidden_size * head_dim * (2 * heads + 2 * kv)
    mlp = 3 * config.hidden_size * config.intermediate_size
    attention = 2 * heads * head_dim * seq / 2  # scores and values, half of them masked
    per_token = config.num_hidden_layers * (projections + mlp + attention) + config.hidden_size * config.vocab_size
    return 3.0 * 2 * batch * seq * per_token
