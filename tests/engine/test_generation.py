"""Text through the sliding engine: the tokens of the model's own generate(), whatever lies where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from families import FAMILIES, PAD, VOCAB, random_model
from slideformer.device.cpu import CpuDevice
from slideformer.engine.generation import Generation, pass_options, shape_of
from slideformer.engine.generator import GenerationEngine, GenerationOptions
from slideformer.errors import BadInput, DoesNotFit
from slideformer.memory import State
from slideformer.model.decoder import Decoder
from slideformer.model.sampling import Chooser, Sampling
from slideformer.native import load

LENGTHS = (9, 4, 7, 7, 2)  # two micro-batches of two rows, and a round of one
NEW = 8


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def decoder_of(family: str, tied: bool, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(FAMILIES[family](tied), dtype=dtype, tile_numel=5000)


@cache
def model_of(family: str, tied: bool) -> PreTrainedModel:
    """Weights three times as large as elsewhere, so that the tokens are many and far apart."""
    model = random_model(FAMILIES[family](tied), attn_implementation="eager")
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(3)
    return model


@cache
def expected(family: str, tied: bool, end_ids: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Each prompt alone, by transformers."""
    found = []
    for prompt in prompts_of():
        out = model_of(family, tied).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=list(end_ids) or None,
            pad_token_id=PAD,
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return tuple(found)


def write_weights(decoder: Decoder, target: State | GenerationEngine, model: PreTrainedModel) -> None:
    params = dict(model.named_parameters())
    for index, unit in enumerate(target.layout.units):
        for param in unit.params:
            target.write(index, unit.offsets[param.name], params[param.name].detach().reshape(-1))


@contextmanager
def generation(
    family: str, tied: bool, *, dtype: torch.dtype = torch.float32, rows: int = 2, micros: int = 2, **changes
) -> Iterator[Generation]:
    """On a device that poisons what is free and delays every piece of work."""
    decoder = decoder_of(family, tied, dtype)
    layout = decoder.layout.untrained()
    shape = replace(shape_of(decoder, LENGTHS, NEW, 1 << 20), rows=rows, micro_batches=micros)
    options = replace(pass_options(shape, layout), **changes)
    with CpuDevice(jitter_s=3e-4, poison=True) as device, closing(load(2)) as kernels:
        state = State(layout, device, kernels, keep_residual=dtype is torch.float32, resident=options.resident)
        write_weights(decoder, state, model_of(family, tied))
        yield Generation(decoder, device, kernels, state, shape, options, {})


@pytest.mark.parametrize(("index", "family"), list(enumerate(FAMILIES)))
def test_every_family_gives_the_tokens_of_its_own_generate(index: int, family: str):
    """Prompts of unequal lengths, several micro-batches, some keys and values on the host."""
    tied, window = index % 2 == 0, 1 + index % 3
    with generation(family, tied, window=window, cached_on_device=index % 5, cache_ring=1 + index % 2) as made:
        found = made.run(prompts_of(), Sampling(max_new_tokens=NEW))
    assert found.tokens == expected(family, tied)
    assert len({token for tokens in found.tokens for token in tokens}) > 5, "the model says too little to tell"


SETTINGS = {
    "one slot, nothing kept on the device": {"window": 1, "cached_on_device": 0, "cache_ring": 1},
    "everything in one place for keys and values": {"window": 3, "cached_on_device": 8},
    "hidden states spill": {"hidden_pool": 0},
    "a sliced head": {"sliced_head": True, "window": 1},
    "some units resident": {"resident": (0, 2, 5), "cached_on_device": 3},
    "all units resident": {"resident": (0, 1, 2, 3, 4, 5, 6), "cached_on_device": 8},
    "a row at a time": {"rows": 1, "micros": 5},
    "one micro-batch": {"rows": 5, "micros": 1},
}


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_do_not_depend_on_what_lies_where(family: str, changes: dict):
    tied = family == "gpt2"
    with generation(family, tied, **changes) as made:
        assert made.run(prompts_of(), Sampling(max_new_tokens=NEW)).tokens == expected(family, tied)


def test_a_prompt_ends_with_its_end_token_and_the_others_go_on():
    whole = expected("llama", True)
    ends = (whole[0][2], whole[3][4])
    cut = expected("llama", True, ends)
    assert {len(tokens) for tokens in cut} > {3}
    with generation("llama", True) as made:
        first = made.run(prompts_of(), Sampling(max_new_tokens=NEW, end_ids=ends))
        again = made.run(prompts_of(), Sampling(max_new_tokens=NEW, end_ids=ends))
    assert first.tokens == again.tokens == cut


def test_no_pass_is_run_to_its_end_after_the_last_end_token(monkeypatch: pytest.MonkeyPatch):
    """All prompts end with their first token; the pass queued behind is dropped, and the next call is right."""
    whole = expected("llama", True)
    ends = tuple({tokens[0] for tokens in whole})
    heard: list[list[tuple[int, int]]] = []
    with generation("llama", True, rows=5, micros=1) as made:
        run_block, ran = made.decoder.forward_cached, []

        def counted(unit: int, *args: object) -> torch.Tensor:
            ran.append(unit)
            return run_block(unit, *args)

        monkeypatch.setattr(made.decoder, "forward_cached", counted)
        found = made.run(prompts_of(), Sampling(max_new_tokens=NEW, end_ids=ends), heard.append)
        assert found.num_passes == 1
        assert ran.count(made.layout.blocks[-1]) == 1
        assert found.tokens == tuple(tokens[:1] for tokens in whole)
        assert made.run(prompts_of(), Sampling(max_new_tokens=NEW)).tokens == whole
    assert [sorted(taken) for taken in heard] == [[(i, tokens[0]) for i, tokens in enumerate(whole)]]


def test_a_caller_hears_of_every_token_once_and_in_order():
    heard: dict[int, list[int]] = {i: [] for i in range(len(LENGTHS))}

    def told(taken: list[tuple[int, int]]) -> None:
        for number, token in taken:
            heard[number].append(token)

    with generation("llama", True) as made:
        found = made.run(prompts_of(), Sampling(max_new_tokens=NEW), told)
    assert tuple(map(tuple, heard.values())) == found.tokens
    assert found.num_passes == 2 * NEW  # two rounds
    assert found.num_tokens == NEW * len(LENGTHS)
    assert found.decoded == (NEW - 1) * len(LENGTHS)


def test_a_draw_is_the_prompts_own_and_that_of_its_seed():
    sampling = Sampling(max_new_tokens=NEW, temperature=1.5, top_k=50, top_p=0.9, seed=3)
    with generation("llama", True) as made:
        found = made.run(prompts_of(), sampling).tokens
        assert made.run(prompts_of(), sampling).tokens == found
        assert made.run(prompts_of(), replace(sampling, seed=4)).tokens != found
    with generation("llama", True, rows=1, micros=5, window=1) as made:
        assert made.run(prompts_of(), sampling).tokens == found
        same = made.run([[7, 8]] * 4, replace(sampling, top_k=0, top_p=1.0)).tokens
        assert len(set(same)) == 4, "prompts that are alike draw alike"


def test_tokens_are_drawn_with_their_probabilities():
    """20,000 draws of 4 tokens: each share within 4 standard deviations (0.0141) of its probability."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chooser = Chooser(Sampling(temperature=2.0), torch.device("cpu"))
    draws = torch.cat([chooser.choose(logits, [0]) for _ in range(20_000)])
    shares = torch.bincount(draws, minlength=4) / len(draws)
    assert (shares - (logits[0] / 2).softmax(-1)).abs().max() < 0.0141
    only = Chooser(Sampling(temperature=2.0, top_k=2, top_p=0.5), torch.device("cpu"))
    assert {int(only.choose(logits, [0])) for _ in range(100)} == {0}


def test_an_engine_that_only_generates_keeps_two_bytes_a_parameter():
    decoder = decoder_of("llama", True, torch.bfloat16)
    with (
        CpuDevice() as device,
        GenerationEngine(
            decoder, device, GenerationOptions(cpu_threads=1), prompt_lengths=LENGTHS, max_new_tokens=NEW
        ) as engine,
    ):
        write_weights(decoder, engine, model_of("llama", True))
        assert engine.state.nbytes == engine.budget.state_nbytes
        assert 2 * engine.layout.numel <= engine.state.nbytes <= 2 * engine.layout.numel + 64 * len(engine.layout.units)
        found = engine.generate(prompts_of(), Sampling(max_new_tokens=NEW)).tokens
    with generation("llama", True, dtype=torch.bfloat16, rows=5, micros=1, window=1, cached_on_device=0) as made:
        assert made.run(prompts_of(), Sampling(max_new_tokens=NEW)).tokens == found


def test_prompts_that_do_not_fit_are_taken_in_rounds_and_too_little_memory_is_refused():
    decoder = decoder_of("llama", True)
    with CpuDevice() as device, closing(load(1)) as kernels:

        def engine(nbytes: int | None, lengths: Sequence[int] = (1000,) * 64) -> GenerationEngine:
            options = GenerationOptions(max_host_memory=nbytes)
            return GenerationEngine(
                decoder, device, options, prompt_lengths=lengths, max_new_tokens=NEW, kernels=kernels
            )

        whole = engine(None)
        assert whole.shape.rows * whole.shape.micro_batches == 64
        needed = whole.budget.host_nbytes + whole.budget.device_nbytes
        less = engine(needed // 2)
        assert 1 <= less.shape.rows * less.shape.micro_batches <= 32
        assert less.budget.host_nbytes + less.budget.device_nbytes <= needed // 2
        with pytest.raises(DoesNotFit, match="max_host_memory.*Shorten the prompts, lower max_new_tokens"):
            engine(1 << 19, (5,))


class Gpu(CpuDevice):
    """Says that it is a GPU with so much memory, which is the host's."""

    kind = "cuda"
    nbytes = 0

    def free_nbytes(self) -> int:
        return self.nbytes


def test_the_device_is_filled_with_weights_first_and_then_with_keys_and_values():
    """From a device that hardly holds a window to one that holds everything: never more than there is, ever more of it
    used, and the same tokens."""
    decoder = decoder_of("llama", False)
    expect = expected("llama", False)
    placed = []
    for kib in (400, 700, 900, 1300, 2600):
        with Gpu() as device:
            device.nbytes = kib << 10
            options = GenerationOptions(cpu_threads=1, micro_tokens=20)
            with GenerationEngine(decoder, device, options, prompt_lengths=LENGTHS, max_new_tokens=NEW) as engine:
                assert engine.budget.device_nbytes <= device.nbytes
                assert engine.predicted_pass_s is not None and engine.predicted_pass_s > 0
                write_weights(decoder, engine, model_of("llama", False))
                assert engine.generate(prompts_of(), Sampling(max_new_tokens=NEW)).tokens == expect
                found, layout = engine.pass_options, engine.layout
                blocks = set(found.resident) & set(layout.blocks)
                placed.append((found.sliced_head, layout.output in found.resident, len(blocks), found.cached_on_device))
    assert placed[0][0] and placed[0][2] == 0, placed
    assert placed[-1] == (False, True, 4, 4 * engine.shape.micro_batches), placed
    assert [p[1:3] for p in placed] == sorted(p[1:3] for p in placed), placed
    assert len(set(placed)) >= 4, placed


BAD = {
    "no prompts": ([], {}, "there are no prompts"),
    "an empty prompt": ([[7], []], {}, "prompt 2 has no tokens"),
    "a token of another model": ([[VOCAB]], {}, f"token id {VOCAB}, which is outside the vocabulary of {VOCAB}"),
    "a long prompt": ([[7] * 10], {}, "prompt 1 has 10 tokens and may get 8; there is room for 9, and 17 with"),
    "too many new tokens": ([[7]], {"max_new_tokens": 17}, "room for 9, and 17 with the new ones"),
}


@pytest.mark.parametrize(("prompts", "changes", "text"), BAD.values(), ids=BAD.keys())
def test_prompts_that_cannot_be_are_refused_in_a_sentence(prompts: list[list[int]], changes: dict, text: str):
    with generation("llama", True) as made, pytest.raises(BadInput, match=text):
        made.run(prompts, replace(Sampling(max_new_tokens=NEW), **changes))


def test_a_position_table_that_ends_is_said():
    decoder = decoder_of("gpt2", True)
    with CpuDevice() as device:
        options = GenerationOptions(cpu_threads=1)
        with GenerationEngine(decoder, device, options, prompt_lengths=[60], max_new_tokens=8) as engine:
            with pytest.raises(BadInput, match="60 tokens and may get 8, and the model's position table has 64"):
                engine.generate([[7] * 60], Sampling(max_new_tokens=8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict, text: str):
    with pytest.raises(BadInput, match=text):
        Sampling(**changes)
