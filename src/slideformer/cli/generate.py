"""slideformer generate"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slideformer.cli.arguments import Debug, Json
from slideformer.cli.exits import ended_by_signals, say, told_in_one_sentence

if TYPE_CHECKING:
    from slideformer.data.prompts import Words
    from slideformer.engine.generation import Generated
    from slideformer.model.sampling import Sampling
    from slideformer.train.generate import Completion, GenerateRequest, Generator, SoFar

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, a checkpoint, or a run's output_dir.")]
PromptTexts = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="What to go on from. Again for more.")]
PromptFile = Annotated[Path | None, typer.Option("--prompts", help="A .txt file with one a line, or rows (.jsonl).")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Whether text goes through the chat template. If there is one, when left out."),
]
System = Annotated[str | None, typer.Option(help="A system message before every conversation.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens for each prompt.")]
Temperature = Annotated[float, typer.Option(help="0: always the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens that make up so much.")]
TopK = Annotated[int, typer.Option("--top-k", help="Draw from so many of the likeliest tokens; 0: from all.")]
Seed = Annotated[int, typer.Option(help="Of the draws.")]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
Dtype = Annotated[str, typer.Option(help="auto (bf16 on a GPU, fp32 on a CPU), bfloat16 or float32.")]
Placement = Annotated[str, typer.Option(help="auto (what has room stays on the GPU), stream or resident.")]
GpuMemory = Annotated[str | None, typer.Option("--max-gpu-memory", help="As in 24GiB.")]
HostMemory = Annotated[str | None, typer.Option("--max-host-memory", help="As in 64GiB.")]
Threads = Annotated[int | None, typer.Option("--cpu-threads", help="Of host work.")]


def generate(
    model: Model,
    prompt: PromptTexts = None,
    prompts: PromptFile = None,
    chat: Chat = None,
    system: System = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    placement: Placement = "auto",
    max_gpu_memory: GpuMemory = None,
    max_host_memory: HostMemory = None,
    cpu_threads: Threads = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate text with a model that may be larger than the GPU. All prompts go through each of its blocks together.

    Takes 2 bytes a parameter in bf16, 4 in fp32. A prompt alone on a terminal is written as it is generated. Ctrl-C
    leaves what there is by then.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json) as beside, ended_by_signals(as_json=as_json, beside=beside):
        words = _words(prompt or [], prompts)
        request = _request(
            model,
            chat,
            system,
            {"device": device, "dtype": dtype, "placement": placement},
            {"max_gpu_memory": max_gpu_memory, "max_host_memory": max_host_memory},
            cpu_threads,
        )
        from slideformer.model.sampling import Sampling
        from slideformer.train.generate import open_generator, speed

        drawn = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
        with open_generator(request, words, max_new_tokens) as generator:
            sampling = replace(drawn, end_ids=generator.codec.end_ids)
            shown = None if as_json else _Shown(generator, streams=len(words) == 1 and sys.stdout.isatty())
            beside["model"] = str(model)
            found = _run(generator, sampling, shown, beside)
            predicted_s = generator.engine.predicted_pass_s
        if as_json:
            print(json.dumps({**beside, **_figures(found, predicted_s)}, indent=2, ensure_ascii=False))
            return
        say(speed(found, predicted_s))


def _run(generator: Generator, sampling: Sampling, shown: _Shown | None, beside: dict[str, object]) -> Generated:
    """All of it, or what there is when a signal or a failure ends it, which is then shown, or put into `beside`."""
    from slideformer.train.generate import SoFar
    from slideformer.train.stop import StopRequests

    so_far = SoFar(generator, sampling)
    try:
        with StopRequests("generation ends after this pass") as stop:

            def told(taken: list[tuple[int, int]]) -> None:
                so_far.take(taken)
                if shown is not None:
                    shown.take(taken, so_far)
                stop.raise_if_asked(f"in the middle: {so_far.sentence()}")

            _, found = generator.run(sampling, told)
            return found
    finally:
        completions = [so_far.completion(number) for number in range(len(generator.prompts))]
        beside["generations"] = [_object(completion) for completion in completions if completion is not None]
        if shown is not None:
            shown.end(completions)


class _Shown:
    """Text on standard output: of one prompt on a terminal as it comes, of several each in its turn."""

    def __init__(self, generator: Generator, *, streams: bool) -> None:
        from slideformer.train.generate import TextStream

        self._stream = TextStream(generator.codec) if streams else None
        self._num_prompts, self._num_shown = len(generator.prompts), 0
        self._begun = False

    def take(self, taken: list[tuple[int, int]], so_far: SoFar) -> None:
        """What a pass has brought."""
        if self._stream is not None:
            print("".join(self._stream.add(token) for _, token in taken), end="", flush=True)
            return
        while self._num_shown < self._num_prompts and so_far.is_finished(self._num_shown):
            self._show(so_far.completion(self._num_shown))
            self._num_shown += 1

    def end(self, completions: list[Completion | None]) -> None:
        """All that has not been shown: nothing more comes. By prompt; None has no token."""
        if self._stream is not None:
            print(flush=True)
            return
        for completion in completions[self._num_shown :]:
            self._show(completion)

    def _show(self, completion: Completion | None) -> None:
        if completion is None:
            return
        text = completion.text
        if self._num_prompts > 1:
            cut = " [interrupted]" if completion.finish_reason == "interrupted" else ""
            text = f"> {_first_line(completion.prompt.text)}{cut}\n{text}"
        print(("\n" if self._begun else "") + text, flush=True)
        self._begun = True


def _words(texts: list[str], file: Path | None) -> list[Words]:
    from slideformer.data.prompts import read_prompts
    from slideformer.errors import BadInput

    found: list[Words] = [*texts, *(read_prompts(file) if file is not None else [])]
    if not found:
        raise BadInput("there is nothing to go on from: give --prompt TEXT, or --prompts FILE")
    return found


def _request(
    model: Path,
    chat: bool | None,
    system: str | None,
    chosen: dict[str, str],
    sizes: dict[str, str | None],
    cpu_threads: int | None,
) -> GenerateRequest:
    from slideformer.config.values import as_nbytes
    from slideformer.engine.generator import GenerationOptions
    from slideformer.errors import BadInput
    from slideformer.train.generate import DTYPES, GenerateRequest

    placements = {"auto": "auto", "stream": (), "resident": "all"}
    for name, allowed in (("dtype", DTYPES), ("placement", placements)):
        if chosen[name] not in allowed:
            raise BadInput(f"--{name} is {chosen[name]!r}, must be {', '.join(allowed)}")
    nbytes = {}
    for name, text in sizes.items():
        try:
            nbytes[name] = as_nbytes(text)
        except ValueError as error:
            raise BadInput(f"--{name.replace('_', '-')}: {error}") from None
    options = GenerationOptions(resident=placements[chosen["placement"]], cpu_threads=cpu_threads, **nbytes)
    return GenerateRequest(model, options, chosen["device"], chosen["dtype"], chat, system)


def _first_line(text: str, width: int = 76) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= width else line[: width - 3] + "..."


def _object(completion: Completion) -> dict[str, object]:
    words = completion.prompt.words
    return {
        "prompt": words if isinstance(words, str) else list(words),
        "num_prompt_tokens": len(completion.prompt.ids),
        "text": completion.text,
        "num_tokens": len(completion.tokens),
        "finish_reason": completion.finish_reason,
    }


def _figures(found: Generated, predicted_s: float | None) -> dict[str, object]:
    from slideformer.train.generate import binds

    lane, share = binds(found.busy, found.pass_s)
    return {
        "num_tokens": found.num_tokens,
        "tokens_per_second": found.tokens_per_second,
        "prompt_seconds": found.prompt_s,
        "decode_seconds": found.decode_s,
        "num_passes": found.num_passes,
        "pass_seconds": found.pass_s,
        "predicted_pass_seconds": predicted_s,
        "busiest_lane": lane,
        "busiest_lane_share": share,
    }
