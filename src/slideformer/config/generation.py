"""Settings of the samples that a run shows of what its model writes."""

from __future__ import annotations

from pydantic import Field, field_validator

from slideformer.config.values import Settings


class GenerationSettings(Settings):
    """What is generated during training, and how often. Greedy, so that two runs can be compared."""

    generate_steps: int = Field(0, ge=0)  # samples after every so many steps, and at the end; 0: none
    generate_max_new_tokens: int = Field(128, ge=1)  # most tokens of a sample
    generate_prompts: tuple[str, ...] | str = ()  # what they go on from: a list, or a file with one a line (or .jsonl)

    @field_validator("generate_prompts", mode="before")
    @classmethod
    def _nothing_is_none(cls, value: object) -> object:
        return () if value is None else value
