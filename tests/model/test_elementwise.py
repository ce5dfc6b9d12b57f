"""Which kernels each family takes, and what is said where they cannot be had. That they run: tests/kernels."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES
from slideformer.errors import BadInput
from slideformer.model import elementwise
from slideformer.model.decoder import Decoder

ACTIVE = {
    "llama": ("rms_norm", "residual", "rotary", "glu"),
    "mistral": ("rms_norm", "residual", "rotary", "glu"),
    "qwen2": ("rms_norm", "residual", "rotary", "glu"),
    "qwen3": ("rms_norm", "residual", "rotary", "glu"),
    "phi3": ("rms_norm", "residual", "rotary", "glu"),
    "granite": ("rms_norm", "rotary", "glu"),
    "gemma2": ("rms_norm", "rotary", "glu"),
    "gemma3": ("rms_norm", "rotary", "glu"),
    "olmo2": ("rms_norm", "rotary", "glu"),
    "olmo": ("rotary", "glu"),
    "cohere": ("rotary", "glu"),
    "phi": ("rotary",),
    "gpt_neox": ("rotary",),
    "gpt2": (),
}


def build(family: str, kernels: str, **more: object) -> Decoder:
    return Decoder(FAMILIES[family](True), dtype=torch.float32, tile_numel=1 << 20, kernels=kernels, **more)


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    """As if Triton ran on the CPU: kernels are put in, and run when the final norm is looked for, so not at all."""
    monkeypatch.setattr(elementwise, "triton_runs", lambda device: True)
    monkeypatch.setattr(elementwise, "_rms_norm", lambda norm, kind, overwrites, x: torch.empty_like(x))


def test_every_supported_family_is_pinned():
    assert set(ACTIVE) == set(FAMILIES)


@pytest.mark.parametrize("family", ACTIVE)
def test_the_kernels_of_a_family(family: str, on_a_gpu):
    ops = ACTIVE[family]
    assert build(family, "auto").kernels == dict.fromkeys(ops, "triton")
    assert build(family, "torch").kernels == dict.fromkeys(ops, "torch")
    if ops:
        assert build(family, "triton").kernels == dict.fromkeys(ops, "triton")
        assert build(family, "triton", without_kernels=ops[:1]).kernels[ops[0]] == "torch"


def test_a_norm_that_is_left_out_leaves_out_what_is_fused_with_it(on_a_gpu):
    found = build("llama", "triton", without_kernels=("rms_norm",)).kernels
    assert found == {"rms_norm": "torch", "residual": "torch", "rotary": "triton", "glu": "triton"}


def test_auto_takes_the_models_own_code_on_a_cpu():
    assert build("llama", "auto").kernels == dict.fromkeys(ACTIVE["llama"], "torch")


def test_triton_is_refused_where_it_cannot_be_had(monkeypatch):
    with pytest.raises(BadInput, match="training is on cpu, and they run on a GPU: use kernels: auto"):
        build("llama", "triton")


@pytest.mark.parametrize("kernels", ["auto", "triton", "torch"])
def test_a_gpu_without_triton_is_refused_before_anything_runs(monkeypatch, kernels):
    monkeypatch.setattr(elementwise.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="triton is not installed, and the loss is computed with it on a GPU: pip"):
        elementwise.apply_kernels(torch.nn.Module(), kernels, torch.device("cuda"))


def test_an_op_that_does_not_exist_cannot_be_left_out():
    with pytest.raises(ValueError, match="no kernel rotery to leave out, only rms_norm, residual, rotary, glu"):
        build("llama", "torch", without_kernels=("rotery",))


def test_a_family_without_kernels_is_named(on_a_gpu):
    with pytest.raises(BadInput, match="no kernels for the blocks of gpt2, only for cohere, gemma2, .*: use kernels"):
        build("gpt2", "triton")


def test_an_activation_without_a_kernel_is_named(on_a_gpu):
    config = FAMILIES["llama"](True)
    config.hidden_act = "relu"
    auto = Decoder(config, dtype=torch.float32, tile_numel=1 << 20, kernels="auto")
    assert auto.kernels == {"rms_norm": "triton", "residual": "triton", "rotary": "triton", "glu": "torch"}
    with pytest.raises(BadInput, match="llama has the activation ReLU here, and there are kernels for .*SiLU"):
        Decoder(config, dtype=torch.float32, tile_numel=1 << 20, kernels="triton")


def test_a_place_that_transformers_no_longer_has_is_an_error(on_a_gpu, monkeypatch):
    monkeypatch.setattr(elementwise, "_with_rotary", lambda module, interleaved: None)
    with pytest.raises(BadInput, match="llama has no place for rotary as this version .* use kernels: auto"):
        build("llama", "triton")


def test_liger_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("slideformer.model.liger.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="liger-kernel is not installed: install it, or use kernels: auto"):
        build("llama", "liger")


def test_the_doctors_list_is_what_is_used(monkeypatch):
    assert elementwise.families_by_op(torch.device("cpu")) == {}
    monkeypatch.setattr(elementwise, "triton_runs", lambda device: True)
    listed = elementwise.families_by_op(torch.device("cuda"))
    model_types = {FAMILIES[family](True).model_type: ops for family, ops in ACTIVE.items()}
    assert listed == {op: sorted(f for f, ops in model_types.items() if op in ops) for op in elementwise.OPS}
