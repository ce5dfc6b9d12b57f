"""Samples of what a model writes while it is trained: greedy, at chosen steps, on prompts that stay the same.

Told on the console, kept in generations.jsonl beside metrics.jsonl, and handed to trackers as text. Training goes on
as it would without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from slideformer.config import TrainConfig
from slideformer.data import Codec
from slideformer.data.prompts import Prompt, Words, encode_prompts, read_prompts
from slideformer.engine import Engine, EngineOptions
from slideformer.engine.generation import Generation, beside_nbytes, shape_of
from slideformer.errors import BadInput
from slideformer.memory.passes import PassShape
from slideformer.model.decoder import Decoder
from slideformer.model.sampling import Sampling
from slideformer.train.generate import Completion, completion
from slideformer.train.lines import LinesFile
from slideformer.train.metrics import GENERATIONS

SHOWN = 300  # characters of a sample on the console; all of it is in the file


def sample_prompts(config: TrainConfig, codec: Codec) -> list[Prompt]:
    """The prompts of generate_prompts. Raises BadInput: a file that cannot be read, or one too long for training."""
    given = config.generate_prompts
    if isinstance(given, str) and not Path(given).is_file():
        raise BadInput(
            f"generate_prompts: there is no file {given}: give one with a prompt a line, or a list of prompts"
        )
    words: list[Words] = list(read_prompts(Path(given)) if isinstance(given, str) else given)
    prompts = encode_prompts(words, codec)
    for number, prompt in enumerate(prompts, 1):
        if len(prompt.ids) > config.max_length:
            raise BadInput(
                f"prompt {number} of generate_prompts has {len(prompt.ids)} tokens, and max_length is "
                f"{config.max_length}: shorten it"
            )
    return prompts


def with_samples(
    options: EngineOptions, decoder: Decoder, prompts: Sequence[Prompt], max_new_tokens: int
) -> EngineOptions:
    """The options with room left for what samples will take beside the engine."""
    if not prompts:
        return options
    shape = _shape(decoder, options, prompts, max_new_tokens)
    ring = None if options.offload_dir is None else options.ring_places
    return replace(options, beside_nbytes=beside_nbytes(decoder.layout, shape, disk_ring=ring))


def _shape(decoder: Decoder, options: EngineOptions, prompts: Sequence[Prompt], max_new_tokens: int) -> PassShape:
    """As many prompts at once as a micro-batch of training has tokens."""
    micro_tokens = options.micro_batch_size * options.max_length
    return shape_of(decoder, [len(prompt.ids) for prompt in prompts], max_new_tokens, micro_tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one prompt came to after a step."""

    step: int
    number: int
    completion: Completion

    def lines(self) -> list[str]:
        """For people."""
        text = " ".join(self.completion.text.split())
        shown = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
        asked = " ".join(self.completion.prompt.text.split())
        return [f"sample {self.number} after step {self.step}: {asked[:76]}", f"  {shown}"]


class Samples:
    """Generates and keeps. Context manager; a line is in the file when `take` returns."""

    def __init__(
        self, config: TrainConfig, engine: Engine, codec: Codec, prompts: Sequence[Prompt], *, after_step: int
    ):
        """after_step: where the run goes on; samples up to it are kept. Nothing is done without generate_steps."""
        self._every, self._path = config.generate_steps, Path(config.output_dir) / GENERATIONS
        self._engine, self._codec, self._prompts, self._after_step = engine, codec, prompts, after_step
        self._sampling = Sampling(max_new_tokens=config.generate_max_new_tokens, end_ids=codec.end_ids)
        self._held = ExitStack()
        self._file: LinesFile | None = None
        self._generation: Generation | None = None

    def __enter__(self) -> Self:
        """Raises DoesNotFit: what samples need is taken now, before the first step."""
        if self._every:
            shape = _shape(self._engine.decoder, self._engine.options, self._prompts, self._sampling.max_new_tokens)
            self._generation = Generation.beside(self._engine, shape)
            kept = lines_of_steps(self._path, self._after_step) if self._after_step else ""
            self._file = self._held.enter_context(LinesFile(self._path, kept=kept))
        else:
            self._path.unlink(missing_ok=True)  # of another run
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._held.close()
        if kind is None and self._generation is not None:  # else a disk may hang, and nobody waits for it here
            self._generation.close()

    def due(self, step: int, *, last: bool) -> bool:
        return self._every > 0 and (last or step % self._every == 0)

    def take(self, step: int, epoch: float, between: Callable[[], None]) -> list[Sample]:
        """Of every prompt, with the weights as they are; the engine is idle. between: called after every pass; what it
        raises ends the samples, and there are no others."""
        assert self._generation is not None and self._file is not None
        self._engine.synchronize()
        found = self._generation.run([prompt.ids for prompt in self._prompts], self._sampling, lambda _: between())
        pairs = zip(self._prompts, found.tokens, strict=True)
        made = [completion(prompt, tokens, self._codec, self._sampling) for prompt, tokens in pairs]
        for one in made:
            line = {
                "global_step": step,
                "epoch": round(epoch, 4),
                "prompt": one.prompt.words if isinstance(one.prompt.words, str) else list(one.prompt.words),
                "text": one.text,
                "num_tokens": len(one.tokens),
                "finish_reason": one.finish_reason,
            }
            self._file.write(line)
        return [Sample(step, number, one) for number, one in enumerate(made, 1)]


def lines_of_steps(path: Path, step: int) -> str:
    """The lines of a run's generations up to a step, torn ones left out."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            if int(json.loads(line)["global_step"]) <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    return "".join(kept)
