"""Settings of the model, and what is trained of it."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from slideformer.config.values import Settings


class ModelSettings(Settings):
    """What is trained."""

    model_name_or_path: str = ""
    attn_implementation: Literal["auto", "eager", "sdpa"] = "auto"
    disable_dropout: bool = False
    kernels: Literal["auto", "triton", "torch", "liger"] = "auto"  # of the blocks' elementwise parts
    allow_pickle: bool = False  # read pytorch_model.bin where there is no safetensors file
    freeze: tuple[str, ...] = ()  # regular expressions searched in parameter names

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_pattern(cls, value: object) -> object:
        return [value] if isinstance(value, str) else [] if value is None else value

    @field_validator("freeze")
    @classmethod
    def _patterns_compile(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value
