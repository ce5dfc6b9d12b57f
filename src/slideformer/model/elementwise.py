"""Puts our Triton kernels in the place of a model's own norms, rotary embedding, gated MLPs and residual additions.

A family's form says which of them its blocks take; a test pins it. Functions are replaced on the modules of one model
(never in transformers itself), so another model in the same process is not touched.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import util
from types import FunctionType, MethodType
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from slideformer.errors import BadInput
from slideformer.model.liger import apply_liger_kernel

OPS = ("rms_norm", "residual", "rotary", "glu")


@dataclass(frozen=True, slots=True)
class Form:
    """What a family's blocks are made of, as far as there are kernels for it.

    norm: what is added to the weight of its RMSNorms, and whether they round before the weight; None: other norms.
    overwrites: RMSNorms whose incoming gradient nobody else reads, so that backward may write over it: not those whose
    output is added to the residual, for an addition gives both its sides one gradient. residual: the block is
    x + attention(norm(x)), then the same with the MLP, and nothing else. rotary: how pairs lie.
    """

    norm: tuple[float, bool] | None = None
    overwrites: tuple[str, ...] = ()
    residual: bool = False
    rotary: Literal["halves", "interleaved"] | None = None
    gated: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        there = (self.norm is not None, self.residual, self.rotary is not None, self.gated)
        return tuple(op for op, is_there in zip(OPS, there, strict=True) if is_there)


_LLAMA = Form(
    norm=(0.0, True),
    overwrites=("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
    residual=True,
    rotary="halves",
    gated=True,
)
_GEMMA = Form(
    norm=(1.0, False),
    overwrites=("input_layernorm", "pre_feedforward_layernorm", "q_norm", "k_norm"),
    rotary="halves",
    gated=True,
)
FORMS: dict[str, Form] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _LLAMA,
    "granite": Form(norm=_LLAMA.norm, overwrites=_LLAMA.overwrites, rotary="halves", gated=True),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": Form(norm=(0.0, False), overwrites=("q_norm", "k_norm"), rotary="halves", gated=True),
    "olmo": Form(rotary="halves", gated=True),
    "cohere": Form(rotary="interleaved", gated=True),
    "phi": Form(rotary="halves"),
    "gpt_neox": Form(rotary="halves"),
}
"""By model_type."""

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
"""Class of an activation module -> the kernel's name for it."""


def triton_runs(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of `device`; on the CPU they do in Triton's interpreter, for tests."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and util.find_spec("triton") is not None


def apply_kernels(
    model: PreTrainedModel, kernels: str, device: torch.device, *, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """Choose kernels for the blocks and the final norm of `model`, and put them in; before its parts are looked for.

    kernels: auto (Triton's where there is a GPU and they can be had, else the model's own), triton (or an error), torch
    (the model's own), liger (the liger-kernel package). without: ops of `OPS` that keep the model's own code, for
    measurements. Returns op -> implementation, for all ops that the family has a kernel for.
    Raises BadInput: triton or liger cannot be had here, or does not know the family or something in it; a GPU without
    Triton, since the loss is computed with it there whatever the blocks run.
    """
    if device.type == "cuda" and util.find_spec("triton") is None:
        raise BadInput("triton is not installed, and the loss is computed with it on a GPU: pip install triton")
    if unknown := {*without} - {*OPS}:
        raise ValueError(f"there is no kernel {', '.join(sorted(unknown))} to leave out, only {', '.join(OPS)}")
    family = model.config.model_type
    form = FORMS.get(family, Form())
    if kernels == "liger":
        apply_liger_kernel(model)
    if kernels == "triton":
        _refuse(family, form, device)
    if kernels not in ("auto", "triton") or not triton_runs(device):
        return dict.fromkeys(form.ops, "liger" if kernels == "liger" else "torch")
    found, problems = _find(model, form)
    if kernels == "triton" and problems:
        raise BadInput(f"kernels: triton, but {family} {next(iter(problems.values()))}: use kernels: auto")
    left = {*without, *problems}
    if "rms_norm" in left:
        left.add("residual")
    for op in form.ops:
        for module, forward in found[op] if op not in left else ():
            module.forward = forward
    return {op: "torch" if op in left else "triton" for op in form.ops}


def families_by_op(device: torch.device) -> dict[str, list[str]]:
    """What `kernels: auto` uses on tensors of `device`: op -> families; empty where Triton does not run."""
    if not triton_runs(device):
        return {}
    return {op: sorted(family for family, form in FORMS.items() if op in form.ops) for op in OPS}


def _refuse(family: str, form: Form, device: torch.device) -> None:
    if not form.ops:
        known = ", ".join(sorted(FORMS))
        raise BadInput(
            f"kernels: triton, but there are no kernels for the blocks of {family}, only for {known}: use kernels: auto"
        )
    if not triton_runs(device):
        raise BadInput(f"kernels: triton, but training is on {device.type}, and they run on a GPU: use kernels: auto")


Found = dict[str, list[tuple[nn.Module, Callable[..., object]]]]


def _find(model: PreTrainedModel, form: Form) -> tuple[Found, dict[str, str]]:
    """Per op of the form, modules and the forward that each would get; and per op that cannot be had, why."""
    found: Found = {op: [] for op in form.ops}
    problems: dict[str, str] = {}
    for name, module in model.named_modules():
        if form.norm is not None and type(module).__name__.endswith("RMSNorm"):
            overwrites = name.rpartition(".")[2] in form.overwrites
            found["rms_norm"].append((module, partial(_rms_norm, module, form.norm, overwrites)))
        elif form.gated and isinstance(getattr(module, "down_proj", None), nn.Linear):
            activation = type(getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)).__name__
            if activation not in _ACTIVATIONS:
                known = ", ".join(sorted(_ACTIVATIONS))
                problems["glu"] = f"has the activation {activation} here, and there are kernels for {known} only"
                continue
            mlp = _halved_mlp if hasattr(module, "gate_up_proj") else _mlp
            found["glu"].append((module, partial(mlp, module, _ACTIVATIONS[activation])))
        elif form.residual and hasattr(module, "self_attn") and hasattr(module, "post_attention_layernorm"):
            found["residual"].append((module, partial(_block, module, form.norm)))
        elif form.rotary is not None and (turned := _with_rotary(type(module), form.rotary == "interleaved")):
            found["rotary"].append((module, MethodType(turned, module)))
    for op, places in found.items():
        if not places and op not in problems:
            problems[op] = f"has no place for {op} as this version of transformers builds it"
    return found, problems


@cache
def _with_rotary(module: type[nn.Module], interleaved: bool) -> FunctionType | None:
    """The forward of an attention module with our function under the name of its own; None if it calls none."""
    name = "apply_rotary_pos_emb"
    own = inspect.unwrap(module.forward)
    if not isinstance(own, FunctionType) or name not in own.__code__.co_names:
        return None
    names = {**own.__globals__, name: partial(_rotary, interleaved=interleaved)}
    turned = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    turned.__kwdefaults__ = own.__kwdefaults__
    return turned


def _eps(norm: nn.Module) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _rms_norm(norm: nn.Module, kind: tuple[float, bool], overwrites: bool, x: torch.Tensor) -> torch.Tensor:
    from slideformer.kernels.rms_norm import rms_norm

    offset, round_first = kind
    return rms_norm(x, norm.weight, eps=_eps(norm), offset=offset, round_first=round_first, overwrite_grad=overwrites)


def _add_rms_norm(
    norm: nn.Module, kind: tuple[float, bool], x: torch.Tensor, add: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from slideformer.kernels.rms_norm import add_rms_norm

    offset, round_first = kind
    return add_rms_norm(
        x, add, norm.weight, eps=_eps(norm), offset=offset, round_first=round_first, overwrite_grad=True
    )


def _block(
    block: nn.Module, kind: tuple[float, bool], hidden_states: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    hidden, normed = _add_rms_norm(block.input_layernorm, kind, hidden_states, None)
    attended = block.self_attn(normed, *args, **kwargs)[0]
    hidden, normed = _add_rms_norm(block.post_attention_layernorm, kind, hidden, attended)
    return hidden + block.mlp(normed)


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from slideformer.kernels.rotary import rotary_

    return rotary_(q, k, cos, sin, interleaved=interleaved)


def _mlp(mlp: nn.Module, activation: str, x: torch.Tensor) -> torch.Tensor:
    from slideformer.kernels.glu import glu

    return mlp.down_proj(glu(mlp.gate_proj(x), mlp.up_proj(x), activation=activation))


def _halved_mlp(mlp: nn.Module, activation: str, x: torch.Tensor) -> torch.Tensor:
    from slideformer.kernels.glu import glu_of_halves

    return mlp.down_proj(glu_of_halves(mlp.gate_up_proj(x), activation=activation))
