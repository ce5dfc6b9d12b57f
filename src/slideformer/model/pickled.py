"""Weights in a pickle (pytorch_model.bin), if somebody asks for it: torch's loader that builds tensors only."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from slideformer.errors import BadInput
from slideformer.model.tensorfile import NAMES, Held

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def read_tensors(path: Path) -> dict[str, Held]:
    """Every tensor of a file by name, mapped and not read. Runs no code from it.

    Raises BadInput: not such a file, more than tensors in it, or in the form of torch before 1.6, which is not mapped.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
            raise ValueError("it holds more than tensors by name")
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"{path} cannot be read as pickled weights ({reason}): use safetensors, or save it anew with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        ) from error
    return {
        name: Held(
            path, name, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), 0, tensor.nbytes, tensor
        )
        for name, tensor in found.items()
    }
