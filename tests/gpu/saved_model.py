"""A model folder with random weights that were drawn on the GPU, and rows to train it on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from data.byte_tokenizer import make_codec

NUM_ROWS = 24


def save(config: PretrainedConfig, folder: Path) -> None:
    """config.json, weights in bf16 and a tokenizer of bytes."""
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 258, 258, 256
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    make_codec().tokenizer.save_pretrained(folder)


def write_rows(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": f"{i} and {i * i} " * 60}) + "\n" for i in range(NUM_ROWS)))
