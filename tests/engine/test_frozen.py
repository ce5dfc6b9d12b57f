"""Frozen parameters: they keep their bits, cost no moments and no backward below the lowest trained unit."""

from __future__ import annotations

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    PLANES,
    engine_on,
    plane_of,
    random_weights,
    repeated,
    run_engine,
    run_sequential,
    toy_batch,
    toy_decoder,
    toy_options,
)
from slideformer.layout import UnitKind
from slideformer.model.decoder import ModelRefused
from slideformer.schedule import LaneName, OpKind, Place

# family, tied, patterns of what is frozen
PATTERNS = {
    "all but the last two blocks": ("llama", False, (r"embed_tokens|layers\.[01]\.|^model\.norm|lm_head",)),
    "all but blocks 1 and 3": ("qwen3", True, (r"layers\.[02]\.", "embed_tokens", r"^model\.norm")),
    "all but the norms": ("llama", True, (r"^(?!.*norm)",)),
    "all but the embedding": ("llama", False, (r"^(?!model\.embed_tokens)",)),
    "all but the tied embedding": ("gemma3", True, (r"^(?!model\.embed_tokens)",)),
    "all but the head": ("llama", False, (r"^(?!lm_head)",)),
    "all but the final norm": ("llama", False, (r"^(?!model\.norm)",)),
    "the head": ("llama", False, ("lm_head",)),
    "the tied embedding": ("llama", True, ("embed_tokens",)),
    "the embedding": ("llama", False, ("embed_tokens",)),
    "all but the positions": ("gpt2", True, (r"^(?!transformer\.wpe)",)),
    "the positions and the embedding": ("gpt2", False, (r"wpe|wte",)),
    "all biases": ("phi", False, (r"bias$",)),
    "all but the bias of the head": ("phi", False, (r"^(?!lm_head\.bias)",)),
    "attention": ("gemma2", True, (r"self_attn",)),
}
SETTINGS = [
    (EAGER, torch.float32, dict(micro_batches=2, saved_on_device=2, window=1)),
    (DEFERRED, torch.bfloat16, dict(micro_batches=2, saved_on_device=None, ring=1, grad_slots=1)),
    (EAGER, torch.bfloat16, dict(micro_batches=1, saved_on_device=0, window=3, ring=1)),
    (DEFERRED, torch.float32, dict(micro_batches=3, saved_on_device=0)),
]
CASES = [(name, SETTINGS[i % 4]) for i, name in enumerate(PATTERNS)]
IDS = [f"{name}, {program['update']}, {str(dtype)[6:]}" for name, (program, dtype, _) in CASES]


@pytest.mark.parametrize(("name", "setting"), CASES, ids=IDS)
def test_what_is_trained_equals_the_sequential_loop_and_what_is_frozen_keeps_its_bits(name, setting):
    family, tied, frozen = PATTERNS[name]
    program, dtype, settings = setting
    decoder = toy_decoder(family, tied=tied, dtype=dtype, frozen=frozen)
    options = toy_options(**program, **settings)
    steps = repeated(toy_batch(options.micro_batches), 3)
    expected = run_sequential(decoder, options, steps)
    assert expected.fall > 0
    with engine_on(decoder, options) as engine:
        assert run_engine(engine, steps) == expected
        for unit, offset, values in random_weights(decoder.layout):
            if offset >= decoder.layout.units[unit].train_numel:
                written = (
                    values
                    if dtype is torch.float32
                    else plane_of(engine.state, unit, "weight")[offset:][: len(values)].float()
                )
                assert torch.equal(engine.read(unit, offset, offset + len(values)), written)
                assert torch.allclose(values, written, rtol=2**-8, atol=0)
        assert_frozen_costs_nothing(engine)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To bf16, ties away from zero: what the weight plane alone holds."""
    return ((values.view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)


def assert_frozen_costs_nothing(engine) -> None:
    layout, plan = engine.layout, engine.plan
    trained = {i for i, u in enumerate(layout.units) if u.train_numel}
    below = [i for i in range(len(layout.units)) if layout.units[i].kind in (UnitKind.TABLE, UnitKind.GLUE)]
    lowest = min((u for u in [*below, *layout.blocks] if u in trained), default=len(layout.units))
    backward = {op.unit for op in plan.ops if op.kind is OpKind.BACKWARD}
    assert backward == {u for u in layout.blocks if u >= lowest}, "backward stops at the lowest trained unit"
    assert any(op.kind is OpKind.EMBED_BACKWARD for op in plan.ops) == any(u in trained for u in below)
    for op in plan.ops:
        if op.lane is LaneName.UPDATE and op.unit >= 0 or op.kind in (OpKind.DOWNLOAD, OpKind.REDUCE):
            assert op.unit in trained, f"{op} is work for a frozen unit"
    numel = {name: sum(plane_of(engine.state, u, name).numel() for u in range(len(layout.units))) for name in PLANES}
    assert numel["exp_avg"] == numel["exp_avg_sq"] == layout.train_numel
    assert numel["residual"] == (layout.numel if engine.decoder.dtype is torch.float32 else layout.train_numel)
    grads = {b.index[0] for b in plan.buffers() if b.place is Place.GRAD_HOST}
    assert grads <= trained


def test_freezing_takes_less_memory():
    """12 bytes a trained parameter, 2 a frozen one in bf16."""
    sizes = {}
    for name, frozen in (("none", ()), ("half", (r"layers\.[01]\.",))):
        decoder = toy_decoder("llama", dtype=torch.bfloat16, frozen=frozen)
        with engine_on(decoder, toy_options(**EAGER)) as engine:
            sizes[name] = (engine.memory()["host_state"], decoder.layout.train_numel)
    saved = sizes["none"][0] - sizes["half"][0]
    assert saved == pytest.approx(10 * (sizes["none"][1] - sizes["half"][1]), abs=64 * 4 * 8)


def test_a_pattern_that_finds_nothing_or_everything_is_refused():
    with pytest.raises(ModelRefused, match="matches none of the model's"):
        toy_decoder(frozen=("no such name",))
    with pytest.raises(ModelRefused, match="match all"):
        toy_decoder(frozen=(".*",))
