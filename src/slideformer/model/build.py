"""Builds an unmodified Hugging Face model without weights, and refuses what the engine would get wrong.

Parameters stay on the meta device for good: the decoder binds views of a slot in their place for one call. Buffers
(rotary frequencies, embedding scales) are not weights, nothing ever binds them: they get their values here.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from slideformer.errors import BadInput
from slideformer.model.packed_attention import BY_SAMPLE, register, works_by_sample


class ModelRefused(BadInput):
    """The engine cannot train this model and get it right. Says what was found, what is allowed, what to do."""


_DROPOUT = re.compile(r"^(?!summary_|classifier_).*(dropout|pdrop|drop_rate)")  # those two: heads of other tasks
_EXPERTS = re.compile(r"(^|_)(experts|local_experts|routed_experts)$")
_ROUTER_LOSS = re.compile(r"^router_.*coef|aux_loss_(coef|alpha)|^router_z_loss")


def build(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "auto",
    disable_dropout: bool = False,
    device: torch.device,
) -> PreTrainedModel:
    """The model of `config` in eval mode: parameters on meta in `dtype`, buffers on `device` with their real values.

    config: not changed, the model gets a copy.
    Raises ModelRefused for a model that is not a plain dense decoder, has dropout, a router loss, quantised weights,
    parameters of another dtype, persistent buffers, or buffers that its own initialisation does not fill.
    """
    config = copy.deepcopy(config)
    refuse_config(config, disable_dropout=disable_dropout)
    config.use_cache = False
    implementation = choose_attention(config) if attn_implementation == "auto" else attn_implementation
    if attn_implementation == "auto" and implementation == "sdpa" and works_by_sample(config, device, dtype):
        register()
        implementation = BY_SAMPLE
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=False
            )
    except (ImportError, ValueError) as error:
        raise ModelRefused(
            f"{config.model_type} cannot be built with attn_implementation {implementation!r}: {error}"
        ) from error
    model.eval()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # the warning reads ids from the device, and ours are remapped
            module.warn_if_padding_and_no_attention_mask = _no_warning
    _refuse_modules(model, dtype, disable_dropout=disable_dropout)
    _fill_buffers(model, device)
    return model


def choose_attention(config: PretrainedConfig) -> str:
    """ "eager" where scores are soft-capped, which sdpa leaves out without a word; "sdpa" everywhere else it exists."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    return "sdpa" if model_class._supports_sdpa else "eager"


def refuse_config(config: PretrainedConfig, *, disable_dropout: bool) -> None:
    """Raise ModelRefused for what a config alone shows to be impossible. disable_dropout: set dropout to 0 in it."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{kind} is an encoder-decoder; only decoder-only models are trained: choose one.")
    if getattr(config, "quantization_config", None):
        raise ModelRefused(
            f"{kind} has quantised weights (quantization_config in config.json); full-parameter training needs float "
            "weights: start from the unquantised checkpoint."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if getattr(config, "auto_map", None):
            raise ModelRefused(
                f"{kind} needs code that comes with the checkpoint (auto_map in config.json); only model classes that "
                "ship with transformers are run: use a checkpoint of a built-in architecture."
            )
        raise ModelRefused(
            f"{kind} has no causal language model in transformers; only AutoModelForCausalLM classes are trained: "
            "use the text-only checkpoint of this family, where there is one."
        )
    if getattr(config, "num_hidden_layers", None) is None:
        raise ModelRefused(
            f"{kind} has no num_hidden_layers of its own: it is put together from several models; only a text model "
            "with one list of blocks is trained: use the text-only checkpoint of this family, where there is one."
        )
    values = {name: value for name, value in config.to_dict().items() if isinstance(value, (int, float))}
    for name, value in values.items():
        if _EXPERTS.search(name) and value > 1:
            raise ModelRefused(
                f"{kind} has {name} = {value}: a mixture of experts needs its router's balancing loss, which is not "
                "computed here; only dense models are trained: choose a dense one."
            )
        if _ROUTER_LOSS.search(name) and value > 0:
            raise ModelRefused(
                f"{kind} has {name} = {value}: a router loss is not computed here and would be dropped in silence; "
                f"only dense models are trained: choose one, or set {name} to 0."
            )
    dropouts = {name: value for name, value in values.items() if _DROPOUT.search(name) and value > 0}
    if dropouts and not disable_dropout:
        raise ModelRefused(_dropout_text(kind, dropouts))
    for name, value in dropouts.items():
        setattr(config, name, type(value)(0))


def _dropout_text(kind: str, found: dict[str, float]) -> str:
    listed = ", ".join(f"{name} = {value}" for name, value in sorted(found.items()))
    return (
        f"{kind} trains with dropout ({listed}), and a block that is run again in backward would draw other masks; "
        "dropout must be 0: set disable_dropout: true to train without it."
    )


def _no_warning(*_args: object) -> None:
    """Padding is the caller's business."""


def _refuse_modules(model: nn.Module, dtype: torch.dtype, *, disable_dropout: bool) -> None:
    kind = model.config.model_type
    dropouts = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    }
    if dropouts and not disable_dropout:
        raise ModelRefused(_dropout_text(kind, {name: module.p for name, module in dropouts.items()}))
    for module in dropouts.values():
        module.p = 0.0
    for name, param in model.named_parameters():
        if param.dtype != dtype:
            raise ModelRefused(
                f"{kind} keeps {name} in {str(param.dtype).removeprefix('torch.')} when the model is in "
                f"{str(dtype).removeprefix('torch.')}; a unit's weights are all of one type: train in float32, or "
                "choose another model."
            )
    persistent = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if persistent:
        raise ModelRefused(
            f"{kind} stores buffers in its checkpoints ({some(persistent)}), which would be neither loaded nor saved; "
            "only parameters may be stored: choose another model."
        )


def some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


@torch.no_grad()
def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give every buffer its value, by the model's own initialisation, which is what from_pretrained runs for them.

    Each is poisoned first, so that one which the initialisation forgets is seen. Computed on the CPU on every device:
    `base ** x` differs in the last bit between devices, and checkpoints are compared across them.
    """
    found = [(n, module, k) for n, module in model.named_modules() for k, b in module._buffers.items() if b is not None]
    for _, module, key in found:
        module._buffers[key] = _poisoned(module._buffers[key])
    model.initialize_weights()
    for name, module, key in found:
        buffer = module._buffers[key]
        poisoned = buffer.isnan().any() if buffer.is_floating_point() else (buffer == _poisoned(buffer)).all()
        if buffer.numel() and poisoned:
            raise ModelRefused(
                f"{model.config.model_type} does not initialise its buffer {name}.{key}, so its value is unknown here; "
                "buffers must come from the model's own _init_weights: choose another model."
            )
        module._buffers[key] = buffer.to(device)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ModelRefused(
                    f"{model.config.model_type} keeps a tensor in the plain attribute {name}.{key}, which has no value "
                    "here; tensors must be parameters or buffers: choose another model."
                )


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        value: float | int | bool = float("nan")
    else:
        value = True if like.dtype == torch.bool else torch.iinfo(like.dtype).min
    return torch.full(like.shape, value, dtype=like.dtype, device="cpu")
