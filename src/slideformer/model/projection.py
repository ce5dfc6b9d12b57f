"""What a model does between its final hidden states and its logits, as numbers a fused kernel can use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PretrainedConfig

# Config names of a factor on the logits, and whether the model multiplies by it or divides. Families not listed here
# are still safe: the parity check compares the logits with the model's own.
_MULTIPLY = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVIDE = ("logits_scaling",)
_MULTIPLY_BY_TYPE = {"hyperclovax": "logits_scaling"}  # the same name as Granite's, used the other way round


@dataclass(frozen=True, slots=True)
class Projection:
    """logits = softcap(scale * (hidden @ weight.T + bias)), softcap(x) = cap * tanh(x / cap) where there is a cap.

    bias: name of the bias parameter in the final unit, or None.
    """

    bias: str | None
    softcap: float | None
    scale: float

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The plain reference of what the fused head computes. [..., H], [V, H] -> [..., V], in their dtype."""
        logits = functional.linear(hidden, weight, bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def projection_of(config: PretrainedConfig, bias: str | None) -> Projection:
    """The projection that the model class of `config` is known to use."""
    scale = 1.0
    if (name := _MULTIPLY_BY_TYPE.get(config.model_type)) is not None:
        scale = float(getattr(config, name))
    else:
        for name in _MULTIPLY:
            scale *= float(getattr(config, name, None) or 1.0)
        for name in _DIVIDE:
            scale /= float(getattr(config, name, None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Projection(bias=bias, softcap=None if softcap is None else float(softcap), scale=scale)
