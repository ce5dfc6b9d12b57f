"""What text from an engine that trains takes: buffers of another shape take the place of the last ones."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from engine.toys import EAGER, toy_decoder, toy_options, write_weights
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Engine
from slideformer.engine.generator import GenerationEngine, GenerationOptions
from slideformer.model.decoder import Call, Decoder
from slideformer.model.sampling import Sampling
from slideformer.schedule import Place


class LockingDevice(CpuDevice):
    """Knows what is page-locked, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: dict[int, int] = {}

    def page_lock(self, tensor: torch.Tensor) -> bool:
        self.locked[tensor.data_ptr()] = tensor.nbytes
        return True

    def page_unlock(self, tensor: torch.Tensor) -> None:
        self.locked.pop(tensor.data_ptr(), None)


def test_the_memory_of_a_smaller_shape_goes_before_that_of_a_larger_one_comes():
    with LockingDevice() as device, Engine(toy_decoder("llama"), device, toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        alone = sum(device.locked.values())
        cached, last = [], []
        for length in (4, 6, 9):
            engine.generate([[7] * length], Sampling(max_new_tokens=5))
            made = engine._generation
            own = {b: h for b, h in made.executor.buffers.items() if b.place is Place.CACHE_HOST}
            cached.append(sum(held.nbytes for held in own.values()))
            last.append(weakref.ref(made))
            assert alone + cached[-1] <= sum(device.locked.values()) < alone + 1.2 * cached[-1] + 8192
            del made, own
            gc.collect()
        assert cached == sorted(set(cached))
        assert [made() is None for made in last] == [True, True, False]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_masks_of_padded_prompts_are_in_the_budget(family: str, monkeypatch):
    """Of all micro-batches at once: each is there until the last block has run."""
    masks: list[int] = []
    embed = Decoder.embed

    def watched(self: Decoder, *args: torch.Tensor, **options: object) -> tuple[torch.Tensor, Call]:
        hidden, call = embed(self, *args, **options)
        found = {id(m): m.nbytes for kwargs in call.kwargs if (m := kwargs.get("attention_mask")) is not None}
        masks.append(sum(found.values()))
        return hidden, call

    lengths = (9, 4, 7, 2, 6)
    options = GenerationOptions(micro_tokens=18, cpu_threads=1)
    decoder = toy_decoder(family)
    with (
        CpuDevice() as device,
        GenerationEngine(decoder, device, options, prompt_lengths=lengths, max_new_tokens=1) as engine,
    ):
        write_weights(engine.layout, engine)
        monkeypatch.setattr(Decoder, "embed", watched)
        engine.generate([[7] * n for n in lengths], Sampling(max_new_tokens=1))
    assert len(masks) == engine.shape.micro_batches == 3
    assert 0 < sum(masks) <= engine.budget.device["masks"] <= 4 * max(masks)
