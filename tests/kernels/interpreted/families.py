"""Every family's blocks with our kernels, forward and backward, against the model's own code in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

from families import FAMILIES, VOCAB, random_model
from model.unit_by_unit import flats_of, run_units, run_whole
from slideformer.model.decoder import Decoder
from slideformer.model.elementwise import FORMS, OPS

WITH_KERNELS = sorted(name for name in FAMILIES if FAMILIES[name](True).model_type in FORMS)


KERNELS = {"rms_norm": ["rms_norm", "add_rms_norm"], "rotary": ["rotary_"], "glu": ["glu", "glu_of_halves"]}


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(6, VOCAB, (2, 4), generator=torch.Generator().manual_seed(0))
    return ids, ids.clone()


def build(family: str, **more: object) -> Decoder:
    """Of one block: the interpreter takes its time."""
    config = FAMILIES[family](True)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return Decoder(config, dtype=torch.float32, tile_numel=1000, kernels="triton", **more)


@pytest.fixture
def called(monkeypatch) -> set[str]:
    """Names of the kernels' functions that were called."""
    names: set[str] = set()

    def watched(name: str, own: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            names.add(name)
            return own(*args, **kwargs)

        return call

    for module, functions in KERNELS.items():
        home = import_module(f"slideformer.kernels.{module}")
        for name in functions:
            monkeypatch.setattr(home, name, watched(name, getattr(home, name)))
    return names


def expected_calls(decoder: Decoder) -> set[str]:
    """What a model with the kernels of `decoder` must have called."""
    form, on = FORMS[decoder.config.model_type], {op for op, how in decoder.kernels.items() if how == "triton"}
    names = {"rms_norm"} if "rms_norm" in on else set()
    names |= {"add_rms_norm"} if {"rms_norm", "residual"} <= on else set()
    names |= {"rotary_"} if "rotary" in on else set()
    halves = decoder.config.model_type == "phi3"
    return names | ({"glu_of_halves" if halves else "glu"} if form.gated and "glu" in on else set())


@pytest.mark.parametrize("family", WITH_KERNELS)
def test_no_further_from_float64_than_the_models_own_code(family: str, called: set[str]) -> None:
    """Ours rounds less often than the model's own code, so its error is the yardstick: 4 times that, for luck."""
    decoder = build(family)
    called.clear()  # the final norm ran when parts were looked for
    model = random_model(decoder.config, attn_implementation=decoder.attn_implementation)
    ids, labels = sample()
    exact = run_whole(copy.deepcopy(model).double(), ids, labels)
    own = run_whole(model, ids, labels)
    assert not called
    ours = run_units(decoder, flats_of(decoder, model.state_dict()), ids, labels)
    assert called == expected_calls(decoder)
    assert set(ours.grads) == set(exact.grads)
    pairs = [("logits", ours.logits, own.logits, exact.logits)]
    pairs += [(name, ours.grads[name], own.grads[name], exact.grads[name]) for name in exact.grads]
    for name, found, theirs, expected in pairs:
        size = expected.norm()
        error, yardstick = (found - expected).norm(), (theirs - expected).norm()
        # a gradient that is zero by symmetry (key biases) is rounding alone
        assert error <= 4 * yardstick + 1e-7 * size + 1e-7, f"{name}: {error / size:.1e}, {yardstick / size:.1e}"


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_is_left_out_runs_the_models_own_code(op: str, called: set[str]) -> None:
    decoder = build("qwen3", without_kernels=(op,))
    assert decoder.kernels == {
        other: "torch" if other == op or (other, op) == ("residual", "rms_norm") else "triton" for other in OPS
    }
    model = random_model(decoder.config)
    run_units(decoder, flats_of(decoder, model.state_dict()), *sample())
    assert called == expected_calls(decoder)


def test_another_model_in_the_process_is_not_touched() -> None:
    ids, labels = sample()
    model = random_model(FAMILIES["qwen3"](True))
    before = run_whole(model, ids, labels)
    build("qwen3")
    after = run_whole(model, ids, labels)
    assert torch.equal(before.logits, after.logits)
