"""Text from an engine that trains: the tokens of its weights as they are, and training as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    LENGTH,
    LR,
    engine_on,
    state_hashes,
    toy_batch,
    toy_decoder,
    toy_options,
    write_weights,
)
from families import VOCAB, random_model
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Engine
from slideformer.engine.fit import budget_of
from slideformer.engine.generation import beside_nbytes, shape_of
from slideformer.errors import BadInput, RunFailed
from slideformer.model.sampling import Sampling

NEW = Sampling(max_new_tokens=5)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(6, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def tokens_of(engine: Engine, prompts: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """By transformers, with the engine's weights."""
    model = random_model(engine.decoder.config, attn_implementation="eager")
    params = dict(model.named_parameters())
    with torch.no_grad():
        for index, unit in enumerate(engine.layout.units):
            for param in unit.params:
                start = unit.offsets[param.name]
                params[param.name].copy_(engine.read(index, start, start + param.numel).view(param.shape))
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return tuple(found)


SETTINGS = {
    "eager": EAGER,
    "deferred, ahead": {**DEFERRED, "ahead": (0, 2, 3)},
    "some resident and kept": {**DEFERRED, "resident": (0, 2, 5), "keep": (2,)},
    "all resident": {**EAGER, "resident": (0, 1, 2, 3, 4, 5)},
    "a sliced head, one slot": {**EAGER, "sliced_head": True, "window": 1},
    "everything on disk": {**EAGER, "disk": "everything"},
    "everything on disk, straight": {**EAGER, "disk": "everything", "gds": True},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_are_those_of_the_weights_and_training_does_not_notice(changes: dict, tmp_path):
    decoder = toy_decoder("llama")
    if changes.get("disk"):
        units = range(len(decoder.layout.units))
        pairs = tuple((c, u) for c in ("weight", "residual", "exp_avg", "exp_avg_sq") for u in units)
        changes = {**changes, "disk": pairs, "offload_dir": str(tmp_path)}
    options = toy_options(micro_batches=2, **changes)
    hashes = []
    for generates in (False, True):
        with engine_on(toy_decoder("llama"), options) as engine:
            write_weights(engine.layout, engine)
            losses = []
            for step in range(3):
                losses.append(engine.step(toy_batch(2, seed=step), lr=LR).loss)
                if generates:  # more prompts than before each time, so that buffers are made anew
                    prompts = prompts_of(*(9, 4, 7, 7)[: step + 2])
                    assert engine.generate(prompts, NEW).tokens == tokens_of(engine, prompts)
            engine.synchronize()
            hashes.append((losses, state_hashes(engine)))
    assert hashes[0] == hashes[1]


def test_buffers_stay_for_calls_that_need_no_more():
    with engine_on(toy_decoder("llama"), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        engine.generate(prompts_of(9, 4), NEW)
        first = engine._generation
        engine.generate(prompts_of(5), NEW)
        assert engine._generation is first
        engine.generate(prompts_of(10), NEW)
        assert engine._generation is not first


def test_a_caller_who_leaves_in_the_middle_leaves_nothing_at_work():
    """An exception of `told`, as a Ctrl-C: training goes on bit for bit, and so does the next text."""

    def leave(_: list[tuple[int, int]]) -> None:
        raise KeyboardInterrupt

    hashes = []
    for leaves in (False, True):
        with engine_on(toy_decoder("llama"), toy_options(**EAGER)) as engine:
            write_weights(engine.layout, engine)
            if leaves:
                with pytest.raises(KeyboardInterrupt):
                    engine.generate(prompts_of(9, 4), Sampling(max_new_tokens=20), leave)
            engine.step(toy_batch(1), lr=LR)
            found = engine.generate(prompts_of(9, 4), NEW).tokens
            hashes.append((found, state_hashes(engine)))
    assert hashes[0] == hashes[1]


def test_prompts_of_nothing_are_refused_and_a_torn_state_says_nothing():
    with engine_on(toy_decoder("llama"), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        for prompts, text in (([], "there are no prompts"), ([[]], "prompt 1 has no tokens")):
            with pytest.raises(BadInput, match=text):
                engine.generate(prompts, NEW)
    with pytest.raises(RunFailed), engine_on(toy_decoder("llama"), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        engine.write(1, 0, torch.full((5000,), torch.nan))
        engine.step(toy_batch(1), lr=LR)
        engine.generate(prompts_of(5), NEW)


def test_what_generation_takes_beside_an_engine_is_counted_to_the_byte():
    decoder, options = toy_decoder("llama"), toy_options(**EAGER)
    shape = shape_of(decoder, [9, 4], 5, options.micro_batch_size * LENGTH)
    nbytes = beside_nbytes(decoder.layout, shape)
    plain, reserved = (
        budget_of(decoder.layout, o, hidden_size=decoder.hidden_size, dtype=decoder.dtype)
        for o in (options, replace(options, beside_nbytes=nbytes))
    )
    assert reserved.device_nbytes - plain.device_nbytes == nbytes[0] > 0
    assert reserved.host_nbytes - plain.host_nbytes == nbytes[1] > 0
    with CpuDevice() as device, Engine(decoder, device, options) as engine:
        write_weights(engine.layout, engine)
        before = device.peak_nbytes()
        engine.generate(prompts_of(9, 4), NEW)
        assert device.peak_nbytes() - before == nbytes[0]
