"""Model shapes by name, from their published configs, or by config file; random weights and tokens for them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

_ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, ffn: int, layers: int, heads: int, *, head_dim: int, factor: float, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={**_ROPE3, "factor": factor},
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_id=128001,
    )


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=tied,
    )


_SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.2-1b": lambda: _llama(2048, 8192, 16, 32, head_dim=64, factor=32.0, tied=True),
    "llama-3.2-3b": lambda: _llama(3072, 8192, 28, 24, head_dim=128, factor=32.0, tied=True),
    "llama-3.1-8b": lambda: _llama(4096, 14336, 32, 32, head_dim=128, factor=8.0, tied=False),
    "qwen3-4b": lambda: _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": lambda: _qwen3(5120, 17408, 40, 40, tied=False),
    "tiny": lambda: LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}

NAMES = tuple(_SHAPES)


def shape(name: str, *, num_layers: int | None = None) -> PretrainedConfig:
    """The config of a shape; num_layers cuts it. name: one of those below, a config.json, or the folder of one."""
    if name in _SHAPES:
        config = _SHAPES[name]()
    elif Path(name).exists():
        config = AutoConfig.from_pretrained(name)
    else:
        raise SystemExit(f"shape is {name!r}, must be one of {', '.join(NAMES)}, a config.json or the folder of one")
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config


PIECE_NUMEL = 1 << 24


def random_weight(name: str, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """bf16 values that depend on the parameter's name alone: norms are one, the rest is normal with deviation 0.02."""
    whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
    start = 0
    for piece in random_pieces(name, shape, device):
        whole.view(-1)[start : start + piece.numel()] = piece
        start += piece.numel()
    return whole


def random_pieces(name: str, shape: tuple[int, ...], device: torch.device | str) -> Iterator[torch.Tensor]:
    """The same, flat and in pieces of at most PIECE_NUMEL, for whoever has no room for all of it."""
    for start in range(0, math.prod(shape), PIECE_NUMEL):
        piece = torch.ones(min(PIECE_NUMEL, math.prod(shape) - start), dtype=torch.bfloat16, device=device)
        if len(shape) > 1:
            seed = int.from_bytes(hashlib.sha256(f"{name} {start}".encode()).digest()[:4], "big")
            piece.normal_(0.0, 0.02, generator=torch.Generator(device=device).manual_seed(seed))
        yield piece


def random_tokens(step: int, rows: int, length: int, vocab_size: int) -> torch.Tensor:
    """int64 [rows, length], never zeros, another draw each step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(1, vocab_size, (rows, length), generator=generator)
