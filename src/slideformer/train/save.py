"""The end result as a Hugging Face folder: weights, configs, and the tokenizer's files as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from slideformer.engine import Engine
from slideformer.model.folder import read_generation_config, save_model

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"


def save(engine: Engine, source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the engine's weights into `target`, with what `source`, the folder they came from, has beside its own.

    Tokenizer files and chat templates are copied byte for byte. Raises RunFailed when the engine's state is torn.
    """
    save_model(target, engine.decoder, engine.read, dtype=dtype, generation_config=read_generation_config(source))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATE_FOLDER, target / TEMPLATE_FOLDER, dirs_exist_ok=True)
