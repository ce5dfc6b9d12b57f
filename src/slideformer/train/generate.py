"""Text from a model folder or a checkpoint: opens an engine that only generates, and turns its tokens into text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from slideformer.data import Codec, load_tokenizer
from slideformer.data.prompts import Prompt, Words, encode_prompts
from slideformer.device import open_device
from slideformer.engine import Engine
from slideformer.engine.generation import Generated, Told
from slideformer.engine.generator import GenerationEngine, GenerationOptions
from slideformer.model import weights
from slideformer.model.decoder import Decoder
from slideformer.model.folder import CONFIG, read_config
from slideformer.model.parity import check_parity
from slideformer.model.sampling import Sampling
from slideformer.schedule import LaneName
from slideformer.train import checkpoint
from slideformer.train.export import Source, find_source

log = logging.getLogger(__name__)

TILE_NUMEL = 1 << 26
"""Nothing is updated, so a tile is only what crosses at once. Small ones cost more than they bring: with eight times as
many a pass of a 3B model had 500 ops, and threads that launch them share one lock."""
PIECE_NUMEL = 1 << 22
DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
FinishReason = Literal["stop", "length", "interrupted"]
HELD_BACK = "\ufffd"  # what a tokenizer gives for the first bytes of a letter


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to generate with. model: a model folder, a checkpoint, or a folder with checkpoints. dtype: auto is bf16 on
    a GPU and fp32 on a CPU. chat, system: as in `encode_prompts`."""

    model: Path
    options: GenerationOptions
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    chat: bool | None = None
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt came to. tokens: an end token included; text: without special tokens. finish_reason: an end
    token, enough tokens, or nobody who waited for more."""

    prompt: Prompt
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason


class Generator:
    """An engine with its tokenizer. From `open_generator`."""

    def __init__(self, engine: GenerationEngine, codec: Codec, prompts: Sequence[Prompt]) -> None:
        self.engine, self.codec, self.prompts = engine, codec, prompts

    def run(self, sampling: Sampling, told: Told = lambda _: None) -> tuple[list[Completion], Generated]:
        """All prompts to their ends. end_ids of the sampling are the tokenizer's, and those of generation_config."""
        found = self.engine.generate([p.ids for p in self.prompts], sampling, told)
        pairs = zip(self.prompts, found.tokens, strict=True)
        return [completion(p, t, self.codec, sampling) for p, t in pairs], found


def completion(prompt: Prompt, tokens: Sequence[int], codec: Codec, sampling: Sampling) -> Completion:
    """Of what a prompt has come to by now."""
    reason: FinishReason = "length" if len(tokens) == sampling.max_new_tokens else "interrupted"
    if tokens and tokens[-1] in sampling.end_ids:
        reason = "stop"
    return Completion(prompt, tuple(tokens), codec.tokenizer.decode(tokens, skip_special_tokens=True), reason)


class SoFar:
    """What the prompts have come to while passes run: nothing that was made is lost when they end too early."""

    def __init__(self, generator: Generator, sampling: Sampling) -> None:
        self._codec, self._prompts, self._sampling = generator.codec, generator.prompts, sampling
        self._tokens: list[list[int]] = [[] for _ in generator.prompts]

    def take(self, taken: Sequence[tuple[int, int]]) -> None:
        """As `Told` hears it."""
        for number, token in taken:
            self._tokens[number].append(token)

    def is_finished(self, number: int) -> bool:
        tokens = self._tokens[number]
        return len(tokens) == self._sampling.max_new_tokens or (bool(tokens) and tokens[-1] in self._sampling.end_ids)

    def completion(self, number: int) -> Completion | None:
        """None: the prompt has no token yet."""
        tokens = self._tokens[number]
        return completion(self._prompts[number], tokens, self._codec, self._sampling) if tokens else None

    def sentence(self) -> str:
        """How far they are."""
        finished, begun = sum(map(self.is_finished, range(len(self._tokens)))), sum(map(bool, self._tokens))
        return f"{finished} of {len(self._tokens)} prompts are finished, {begun - finished} more have a part of theirs"


def complete(
    engine: Engine, codec: Codec, words: Sequence[Words], sampling: Sampling, *, chat: bool | None, system: str | None
) -> list[Completion]:
    """What an engine that trains writes behind each of these; the tokenizer's end tokens unless the sampling has some.
    Raises BadInput, and as `Engine.generate` does."""
    prompts = encode_prompts(words, codec, chat=chat, system=system)
    drawn = sampling if sampling.end_ids else replace(sampling, end_ids=codec.end_ids)
    found = engine.generate([prompt.ids for prompt in prompts], drawn)
    return [completion(p, t, codec, drawn) for p, t in zip(prompts, found.tokens, strict=True)]


class TextStream:
    """Text of one prompt as its tokens come: `add` gives what is new and will not change any more."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self._tokens, self._shown = codec, [], 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self._codec.tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith(HELD_BACK):
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new


@contextmanager
def open_generator(request: GenerateRequest, words: Sequence[Words], max_new_tokens: int) -> Iterator[Generator]:
    """Everything that is needed for these prompts, weights loaded. Raises BadInput and DoesNotFit before that."""
    source = None
    if not (request.model / CONFIG).is_file() or (request.model / checkpoint.MANIFEST).is_file():
        source = find_source(request.model, None)
    folder = request.model if source is None else source.model
    model_config = read_config(folder)
    codec = load_tokenizer(folder)
    prompts = encode_prompts(words, codec, chat=request.chat, system=request.system)
    lengths = [len(prompt.ids) for prompt in prompts]
    _warn_of_length(getattr(model_config, "max_position_embeddings", None), max(lengths), max_new_tokens)
    check_parity(model_config, disable_dropout=True)
    with open_device(request.device) as device:
        dtype = DTYPES[request.dtype] or (torch.bfloat16 if device.kind == "cuda" else torch.float32)
        decoder = Decoder(
            model_config,
            dtype=dtype,
            tile_numel=TILE_NUMEL,
            disable_dropout=True,
            kernels="auto",
            device=device.torch_device,
        )
        if source is None:
            weights.check(folder, decoder.layout, names=decoder.names)
        with GenerationEngine(
            decoder, device, request.options, prompt_lengths=lengths, max_new_tokens=max_new_tokens
        ) as engine:
            if source is None:
                weights.load(folder, engine.layout, engine.write, names=decoder.names)
            else:
                _copy(source, engine)
            yield Generator(engine, codec, prompts)


def _warn_of_length(most: int | None, longest: int, max_new_tokens: int) -> None:
    if most is not None and longest + max_new_tokens > most:
        log.warning(
            "the model was made for %d positions, and a prompt of %d tokens with %d new ones is longer: what comes "
            "after them means little; lower --max-new-tokens or shorten the prompt",
            most,
            longest,
            max_new_tokens,
        )


def _copy(source: Source, engine: GenerationEngine) -> None:
    """Weights of a checkpoint, parameter by parameter: its layout may order them differently."""
    for index, unit in enumerate(engine.layout.units):
        theirs = source.decoder.layout.units[index].offsets
        for param in unit.params:
            for start in range(0, param.numel, PIECE_NUMEL):
                stop = min(start + PIECE_NUMEL, param.numel)
                values = source.read(index, theirs[param.name] + start, theirs[param.name] + stop)
                engine.write(index, unit.offsets[param.name] + start, values)


def binds(busy: Mapping[LaneName, float], pass_s: float) -> tuple[str, float]:
    """The lane that works the largest share of a pass, and that share."""
    lane = max(busy, key=lambda name: busy[name], default=LaneName.COMPUTE)
    return str(lane), min(busy.get(lane, 0.0) / pass_s, 1.0) if pass_s else 0.0


def speed(found: Generated, predicted_s: float | None = None) -> str:
    """Tokens a second, and what they hang on, in a sentence. predicted_s: of a pass, by the plan."""
    lane, share = binds(found.busy, found.pass_s)
    what = {
        "upload": "weights cross the link, for more prompts at once in the same time; more device memory shortens it",
        "fetch": "keys and values cross the link; more device memory, or fewer or shorter prompts, shorten it",
        "compute": "the device's own work",
    }.get(lane, "host work")
    text = f"{found.num_tokens} tokens in {found.prompt_s + found.decode_s:.2f} s"
    if found.decoded:
        text += f" ({found.prompt_s:.2f} s of them for the prompts), {found.tokens_per_second:.1f} tokens/s"
        promised = "" if predicted_s is None else f" ({predicted_s:.3g} s by the plan)"
        text += f", {found.pass_s:.3g} s a pass{promised}; {lane} is busy {share:.0%} of it: {what}"
    return text
