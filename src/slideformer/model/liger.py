"""Elementwise kernels of the liger-kernel package in a model's blocks, where a user asks for them by name."""

from __future__ import annotations

from importlib import import_module, util

from transformers import PreTrainedModel

from slideformer.errors import BadInput


def apply_liger_kernel(model: PreTrainedModel) -> None:
    """Patch the modules of `model` (rotary embedding: the family's function, for the whole process).

    Loss and output projection stay ours. Raises BadInput where the package is missing or does not know the family.
    """
    if util.find_spec("liger_kernel") is None:
        raise BadInput("kernels: liger, but liger-kernel is not installed: install it, or use kernels: auto")
    patches = import_module("liger_kernel.transformers.monkey_patch")
    family = model.config.model_type
    if family not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(patches.MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise BadInput(f"kernels: liger, but liger-kernel does not know {family}, only {known}: use kernels: auto")
    patches._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
