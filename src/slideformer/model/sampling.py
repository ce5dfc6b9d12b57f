"""How the next token is chosen from logits: transformers' own rules, and a draw that is each prompt's own.

A prompt draws from a generator of its own, so what it becomes does not depend on which others are generated beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slideformer.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many tokens, and which. temperature 0: always the likeliest. top_k 0, top_p 1: all of them may come.

    end_ids: tokens after which a prompt is done; the one that came is the last of its tokens.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises BadInput."""
        if self.max_new_tokens < 1:
            raise BadInput(f"max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature is {self.temperature}, must be a finite number of at least 0 (0: greedy)")
        if self.top_k < 0:
            raise BadInput(f"top_k is {self.top_k}, must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p}, must be above 0 and at most 1")
        given = [f"top_k: {self.top_k}"] * (self.top_k > 0) + [f"top_p: {self.top_p}"] * (self.top_p < 1)
        if self.temperature == 0 and given:
            raise BadInput(
                f"temperature is 0, which always takes the likeliest token, so {' and '.join(given)} "
                "would have no effect: set a temperature above 0 too, or leave them out"
            )


class Chooser:
    """Chooses tokens for prompts, each known by its number."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling, self._device = sampling, device
        self._generators: dict[int, torch.Generator] = {}
        self._rules = LogitsProcessorList()
        if sampling.temperature not in (0.0, 1.0):
            self._rules.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._rules.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._rules.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits: torch.Tensor, prompts: Sequence[int]) -> torch.Tensor:
        """One token a row. logits: fp32 [rows, vocabulary]; prompts: the number of each row's. Returns int64 [rows].

        A draw divides probabilities by exponential noise and takes the largest, which has just those probabilities.
        """
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        probabilities = self._rules(None, logits).softmax(-1)
        noise = torch.stack([self._noise(prompt, logits.shape[-1]) for prompt in prompts])
        return (probabilities / noise).argmax(-1)

    def _noise(self, prompt: int, vocabulary: int) -> torch.Tensor:
        if prompt not in self._generators:
            seed = (self._sampling.seed * 1_000_003 + prompt) % 2**63
            self._generators[prompt] = torch.Generator(self._device).manual_seed(seed)
        noise = torch.empty(vocabulary, device=self._device).exponential_(generator=self._generators[prompt])
        return noise.clamp_(min=torch.finfo(noise.dtype).tiny)
