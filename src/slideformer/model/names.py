"""What a model's parameters are called in checkpoint files, where that differs from their names in the module."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slideformer.model.build import ModelRefused
from slideformer.model.weights import CheckpointNames


def checkpoint_names(model: PreTrainedModel) -> CheckpointNames:
    """From the model class's own rules, the ones that its save_pretrained and from_pretrained follow.

    Raises ModelRefused if a file does not hold the parameters one by one (but fused or cut otherwise).
    """
    table = model.get_input_embeddings().weight
    params = dict(model.named_parameters(remove_duplicate=False))
    copies = [name for name, param in params.items() if param is table][1:]
    return CheckpointNames(
        stored=_stored(model, list(params)),
        base_prefix=f"{model.base_model_prefix}." if model.base_model_prefix else "",
        tied_copy=copies[0] if copies else None,
        ignored=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )


def _stored(model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """Send stand-ins through the conversion that save_pretrained applies; each is known by its length."""
    stand_ins = {name: torch.empty(index, device="meta") for index, name in enumerate(names)}
    try:
        stored = {names[len(tensor)]: name for name, tensor in revert_weight_conversion(model, stand_ins).items()}
    except Exception as error:  # whatever a conversion does to a tensor that is not what it expects
        raise _refusal(model) from error
    if set(stored) != set(names):
        raise _refusal(model)
    return {name: in_file for name, in_file in stored.items() if name != in_file}


def _refusal(model: PreTrainedModel) -> ModelRefused:
    return ModelRefused(
        f"{model.config.model_type} does not store its parameters in files one by one as the module holds them; only "
        "plain or renamed ones are read and written: choose another model."
    )
