"""Shapes are those of the published models, and every system gets the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import shapes
from shapes import random_pieces, random_tokens, random_weight, shape

PARAMS = {  # as the models' cards and index files count them
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_shape_has_the_parameters_of_the_published_model(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape(name))
    assert sum(p.numel() for p in model.parameters()) == PARAMS[name]


def test_a_shape_may_be_a_config_file_or_its_folder(tmp_path):
    shape("tiny", num_layers=3).save_pretrained(tmp_path)
    for given in (tmp_path, tmp_path / "config.json"):
        assert shape(str(given)).num_hidden_layers == 3
    with pytest.raises(SystemExit, match="shape is 'small', must be one of llama-3.2-1b"):
        shape("small")


def test_weights_in_pieces_are_the_whole_ones(monkeypatch):
    monkeypatch.setattr(shapes, "PIECE_NUMEL", 100)
    whole = random_weight("a.weight", (30, 11), "cpu")
    assert torch.equal(torch.cat(list(random_pieces("a.weight", (30, 11), "cpu"))), whole.flatten())
    assert not torch.equal(whole.flatten()[:100], whole.flatten()[100:200])
    assert 0.015 < whole.float().std() < 0.025 and torch.equal(random_weight("n", (7,), "cpu"), torch.ones(7))
    assert not torch.equal(random_weight("b.weight", (30, 11), "cpu"), whole)


def test_tokens_are_never_zero_and_another_draw_each_step():
    first, second = (random_tokens(step, 8, 64, 50) for step in (0, 1))
    assert first.min() >= 1 and first.max() < 50 and not torch.equal(first, second)
