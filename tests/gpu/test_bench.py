"""slideformer bench on a GPU: what it predicts and plans is measured here, and it is what it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from cli.conftest import slideformer  # noqa: F401 a fixture


@pytest.mark.parametrize("placement", ["auto", "stream"])
def test_a_config_is_timed_within_its_plan(slideformer, tmp_path: Path, placement: str) -> None:  # noqa: F811
    LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path / "model")
    words = ["model_name_or_path=model", "device=cuda", "max_length=1024", "per_device_train_batch_size=4"]
    done = slideformer("bench", *words, f"placement={placement}", "max_gpu_memory=8GiB", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["device_kind"], found["dtype"], found["predicted_by"]) == ("cuda", "bfloat16", "measured rates")
    assert 0 < found["mfu"] < 1
    device = found["memory"]["device"]
    assert 0.5 * device["planned_nbytes"] < device["measured_nbytes"] <= 1.05 * device["planned_nbytes"]
    assert found["pinned_gib"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
