"""A model folder and a config from somebody else run nothing, read nothing of ours, and take no secret along."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest


class Hostile:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def model(toy, tmp_path) -> Path:
    shutil.copytree(toy / "model", tmp_path / "model")
    return tmp_path / "model"


def one_sentence(done) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1].removeprefix("error: ")


def test_code_beside_a_model_is_never_run(slideformer, yaml_for, model, tmp_path) -> None:
    """As an unknown class, and with a known one that the config would have replaced."""
    hostile = f"open({str(tmp_path / 'pwned')!r}, 'w')\n"
    for name in ("modeling_toy.py", "configuration_toy.py", "tokenization_toy.py", "__init__.py", "conftest.py"):
        (model / name).write_text(hostile)
    stored = json.loads((model / "config.json").read_text())
    stored["auto_map"] = {
        "AutoConfig": "configuration_toy.ToyConfig",
        "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM",
    }
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_toy.ToyTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (model / "config.json").write_text(json.dumps(stored))
    done = slideformer("train", yaml_for(model_name_or_path="model", max_steps=1))
    assert done.returncode == 0, done.stderr
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not list((tmp_path / "out").glob("*.py"))
    (model / "config.json").write_text(json.dumps({**stored, "model_type": "toy"}))
    assert "is not a model config that transformers knows" in one_sentence(
        slideformer("train", yaml_for(model_name_or_path="model", output_dir="other"))
    )
    assert not (tmp_path / "pwned").exists()


def test_a_config_cannot_ask_for_code_or_hold_a_token(slideformer, yaml_for) -> None:
    found = one_sentence(slideformer("train", yaml_for(trust_remote_code="true")))
    assert "trust_remote_code: code that comes with a model is never run" in found
    found = one_sentence(slideformer("train", yaml_for(hub_token="hf_abcdefghijklmnopqrstuvwxyz")))
    assert "hub_token: a token does not belong in a config" in found and "hf_abc" not in found


def test_pickled_weights_are_not_read_unless_asked_for(slideformer, yaml_for, model, tmp_path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(tmp_path / "pwned")))
    found = one_sentence(slideformer("train", yaml_for(model_name_or_path="model")))
    assert "holds pytorch_model.bin but no safetensors; pickled weights can run code and are not read" in found
    found = one_sentence(slideformer("train", yaml_for(model_name_or_path="model"), "--allow-pickle"))
    assert "pytorch_model.bin" in found
    assert not (tmp_path / "pwned").exists()


def test_a_push_that_cannot_work_is_refused_before_training(slideformer, yaml_for, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    done = slideformer("train", yaml_for(push_to_hub="true", hub_model_id="somebody/model"))
    assert "push_to_hub needs a token of the hub" in one_sentence(done)
    assert not (tmp_path / "out").exists()
