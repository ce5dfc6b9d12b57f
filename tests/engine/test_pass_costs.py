"""The virtual clock of generation: what binds a pass, on models of a real size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slideformer.engine.costs import ASSUMED
from slideformer.engine.pass_costs import predicted_pass_s
from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.memory.passes import PassShape
from slideformer.schedule import PassOptions

RATES = replace(ASSUMED["cuda"], link_nbytes=50e9)
KEPT = 2 * 8 * 128


def layout(num_blocks: int = 28) -> Layout:
    """3.2 B parameters, tied, as Llama-3.2-3B has them; blocks of 100 M."""
    units = [Unit("table", UnitKind.TABLE, (Param("table", (128256, 3072)),))]
    units += [Unit(f"block.{b}", UnitKind.BLOCK, (Param(f"w{b}", (32768, 3072)),)) for b in range(num_blocks)]
    units.append(Unit("final", UnitKind.FINAL, (Param("final", (3072,)),)))
    return Layout(tuple(units), 1 << 23, tied=True)


def shape(prompts: int, micro_batches: int = 1, prompt_length: int = 128) -> PassShape:
    rows = prompts // micro_batches
    return PassShape(micro_batches, rows, prompt_length, prompt_length + 64, 3072, torch.bfloat16, KEPT)


def options(of: PassShape, **changes: object) -> PassOptions:
    whole = {"cached_on_device": 1000, "window": 2, "hidden_pool": of.micro_batches + 1, "first": False}
    return PassOptions(**{**whole, "micro_batches": of.micro_batches, **changes})


@pytest.mark.parametrize(("prompts", "micros"), [(1, 1), (8, 1), (64, 1), (64, 4)])
def test_a_streamed_pass_takes_what_the_blocks_take_across_the_link_however_many_prompts(prompts: int, micros: int):
    """At least 0.8 of prompts x link rate / 2 bytes a parameter are asked for; choosing tokens is hidden."""
    whole, of = layout(), shape(prompts, micros)
    blocks_s = sum(whole.units[u].numel for u in whole.blocks) * 2 / RATES.link_nbytes
    found = predicted_pass_s(whole, of, options(of), RATES)
    assert found == pytest.approx(blocks_s, rel=0.02)
    assert whole.numel * 2 / RATES.link_nbytes / found >= 0.8


def test_one_slot_loses_the_overlap_and_resident_blocks_shorten_a_pass():
    whole, of = layout(), shape(8)
    streamed = predicted_pass_s(whole, of, options(of), RATES)
    assert predicted_pass_s(whole, of, options(of, window=1), RATES) > 1.05 * streamed
    half = predicted_pass_s(whole, of, options(of, resident=whole.blocks[:14]), RATES)
    assert half == pytest.approx(streamed / 2, rel=0.05)
    everything = options(of, resident=tuple(range(len(whole.units))))
    assert predicted_pass_s(whole, of, everything, RATES) < streamed / 5


def test_keys_and_values_from_the_host_bind_when_there_are_many():
    """64 prompts of 4,000 tokens: 28 x 64 x 4,032 x 4 KiB are 30 GB a pass, more than all weights."""
    whole, of = layout(), shape(64, 16, 4000)
    near = predicted_pass_s(whole, of, options(of), RATES)
    far = predicted_pass_s(whole, of, options(of, cached_on_device=0), RATES)
    assert far == pytest.approx(28 * 64 * 4032 * KEPT * 2 / RATES.link_nbytes, rel=0.1) and far > 2 * near
