"""The folder of a Hugging Face model: its config in, and a whole model out that `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from slideformer.errors import BadInput
from slideformer.model import files, weights
from slideformer.model.decoder import Decoder

CONFIG, GENERATION = "config.json", "generation_config.json"


def read_config(folder: Path | str) -> PretrainedConfig:
    """The model config in `folder`. Runs no code from it and asks no network.

    Raises BadInput: no folder, no config.json, not JSON, an unknown or missing model_type.
    """
    folder = Path(folder)
    path = folder / CONFIG
    if not folder.is_dir():
        raise BadInput(
            f"{folder} is not a folder; give the folder of a Hugging Face checkpoint on this machine (a model of the "
            "hub is downloaded first: hf download NAME --local-dir FOLDER)."
        )
    if not path.is_file():
        raise BadInput(
            f"{folder} has no {CONFIG}; give the folder of a Hugging Face checkpoint, which slideformer export makes "
            "of a run's."
        )
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or "model_type" not in stored:
            raise ValueError("it names no model_type")
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"{path} is not a model config that transformers knows ({reason}): correct it, or upgrade transformers if "
            "the model is newer."
        ) from error


def read_generation_config(folder: Path | str) -> GenerationConfig | None:
    """The generation settings in `folder`, or None if it has none. Raises BadInput if they cannot be read."""
    path = Path(folder) / GENERATION
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read ({error}): correct or remove it.") from error


def save_model(
    folder: Path | str,
    decoder: Decoder,
    read: weights.Read,
    *,
    dtype: torch.dtype,
    max_shard_nbytes: int = 5 * 10**9,
    generation_config: GenerationConfig | None = None,
) -> dict[str, files.Sum]:
    """Weights (see `weights.save`), config.json and generation_config.json, renamed into place together.

    generation_config: the source's; None derives one from the config, as transformers does.
    """
    config = copy.deepcopy(decoder.config)
    config.dtype = dtype
    config.architectures = [decoder.architecture]
    if hasattr(config, "auto_map"):  # names files with code that are not copied; the class used here ships anyway
        del config.auto_map
    generation = generation_config or GenerationConfig.from_model_config(config)
    texts = {CONFIG: config.to_json_string(), GENERATION: generation.to_json_string()}
    return weights.save(
        folder, decoder.layout, read, dtype=dtype, names=decoder.names, max_shard_nbytes=max_shard_nbytes, beside=texts
    )
