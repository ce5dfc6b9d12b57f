"""Toy configs of every supported family, each with the traits on that make its family different.

Hidden 64, 4 blocks, vocabulary 307 (a prime: nothing divides it by chance), sequences of up to 64 tokens. A sliding
window is 5 tokens, shorter than any sequence the tests use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 307
PAD = 5

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


def _llama(tied: bool) -> PretrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return LlamaConfig(**_BASE, rope_parameters=rope, tie_word_embeddings=tied)


def _qwen2(tied: bool) -> PretrainedConfig:
    return Qwen2Config(**_BASE, tie_word_embeddings=tied)


def _qwen3(tied: bool) -> PretrainedConfig:
    return Qwen3Config(**_BASE, head_dim=24, tie_word_embeddings=tied)


def _mistral(tied: bool) -> PretrainedConfig:
    return MistralConfig(**_BASE, sliding_window=5, tie_word_embeddings=tied)


def _gemma2(tied: bool) -> PretrainedConfig:
    return Gemma2Config(
        **_BASE,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=tied,
    )


def _gemma3(tied: bool) -> PretrainedConfig:
    return Gemma3TextConfig(
        **_BASE,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=tied,
    )


def _phi3(tied: bool) -> PretrainedConfig:
    return Phi3Config(
        **_BASE,
        sliding_window=5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        original_max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def _phi(tied: bool) -> PretrainedConfig:
    return PhiConfig(
        **_BASE,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        qk_layernorm=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=tied,
    )


def _olmo(tied: bool) -> PretrainedConfig:
    return OlmoConfig(**_BASE, clip_qkv=1.0, tie_word_embeddings=tied)


def _olmo2(tied: bool) -> PretrainedConfig:
    return Olmo2Config(**_BASE, tie_word_embeddings=tied)


def _gpt2(tied: bool) -> PretrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )


def _gpt_neox(tied: bool) -> PretrainedConfig:
    base = {k: v for k, v in _BASE.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return GPTNeoXConfig(
        **base,
        intermediate_size=96,
        hidden_dropout=0.0,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=tied,
    )


def _granite(tied: bool) -> PretrainedConfig:
    return GraniteConfig(
        **_BASE,
        embedding_multiplier=3.0,
        logits_scaling=8.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        tie_word_embeddings=tied,
    )


def _cohere(tied: bool) -> PretrainedConfig:
    return CohereConfig(**_BASE, logit_scale=0.25, use_qk_norm=True, tie_word_embeddings=tied)


FAMILIES: dict[str, Callable[[bool], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "phi": _phi,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": _granite,
    "cohere": _cohere,
}


def random_model(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """The whole model, built the ordinary way on the CPU, every parameter random (norms and biases too), eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator) * (0.1 if param.ndim < 2 else 0.05)
            param.add_(noise.to(dtype))
    return model.eval()
