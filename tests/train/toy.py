"""A toy model folder with the byte-level tokenizer, and rows of sums to train it on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.byte_tokenizer import make_codec
from slideformer.config import TrainConfig


def make_model(folder: Path, *, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Random Llama weights: 4 blocks, hidden 64, tied."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "pad_token_id": 258,
        "eos_token_id": 258,
        "bos_token_id": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).to(dtype)
    model.save_pretrained(folder)
    make_codec().tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    return folder


def write_sums(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations: 3+14 -> 17."""
    chance = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            a, b = chance.randrange(50), chance.randrange(50)
            messages = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_config(model: Path, rows: Path, output: Path, **fields: object) -> TrainConfig:
    """Small batches on the CPU; `fields` win."""
    defaults = {
        "model_name_or_path": str(model),
        "dataset": str(rows),
        "output_dir": str(output),
        "device": "cpu",
        "cpu_threads": 1,
        "max_length": 48,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "tile_numel": 4096,
    }
    return TrainConfig.model_validate({**defaults, **fields})
