"""slideformer export as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture
def trained(slideformer, yaml_for) -> None:
    done = slideformer("train", yaml_for(), "save_steps=2")
    assert done.returncode == 0, done.stderr


def test_a_run_is_exported_and_the_command_for_llama_cpp_is_told(slideformer, trained, tmp_path) -> None:
    done = slideformer("export", "out/checkpoint-2", "to", "--dtype", "bf16", "--max-shard-size", "100KB")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("out/checkpoint-2 is in to: 0.00 GB in ") and lines[0].endswith("read back as written")
    assert lines[1].startswith("  model-00001-of-0000")
    assert lines[-2:] == [
        "for llama.cpp:",
        "  python llama.cpp/convert_hf_to_gguf.py to --outfile to-bf16.gguf --outtype bf16",
    ]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "to").dtype == torch.bfloat16
    as_json = slideformer("export", "out", "again", "--json")
    facts = json.loads(as_json.stdout)
    assert facts["source"] == "out" and facts["hub"] is None
    assert set(facts["files"]) >= {"config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert list(facts["weights"]) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nowhere", "to"), "there is no folder nowhere: give a checkpoint"),
        (("out", "to", "--dtype", "int4"), "--dtype is 'int4', must be auto, bfloat16 or float32"),
        (("out", "to", "--max-shard-size", "five"), "--max-shard-size is 'five', which is no size: write 5GB"),
        (("out", "out"), "the target, out, is where the weights come from: choose another folder"),
        (("out", "to", "--push-to-hub", "--hub-model-id", "a/b/c"), "hub_model_id is 'a/b/c'"),
    ],
)
def test_bad_words_end_with_2_and_a_sentence(slideformer, trained, words, expected) -> None:
    done = slideformer("export", *words)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {expected}")


def test_a_folder_with_other_files_is_left_alone(slideformer, trained, tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "config.json"):
        (tmp_path / "thesis" / name).write_text("mine")
    done = slideformer("export", "out", "thesis", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == (
        "thesis has files that are not an earlier export's (a.txt, b.txt, c.txt and 1 more): choose another folder, or "
        "--overwrite to write there all the same"
    )
    assert (tmp_path / "thesis/config.json").read_text() == "mine"
    assert slideformer("export", "out", "thesis", "--overwrite").returncode == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "thesis")
    assert (tmp_path / "thesis/a.txt").read_text() == "mine"


def test_an_earlier_export_is_replaced_and_the_result_of_a_run_is_not(slideformer, trained, tmp_path) -> None:
    (tmp_path / "to").mkdir()  # an empty folder is nobody's
    for _ in range(2):
        assert slideformer("export", "out/checkpoint-2", "to").returncode == 0
    done = slideformer("export", "to", "out")
    assert done.returncode == 2
    assert "error: out is the output_dir of a run, whose result this would replace: choose another" in done.stderr


@pytest.mark.parametrize("words", [("preview", "nowhere.yaml"), ("doctor", "--device", "tpu"), ("export", "a", "b")])
def test_every_command_gives_its_error_as_json(slideformer, words) -> None:
    done = slideformer(*words, "--json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["exit_code"] == 2 and done.stderr.strip().endswith(found["error"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("generate",), "Missing argument 'MODEL'."),
        (("doctor", "--devise", "cpu"), "No such option: --devise"),
        (("config", "shwo"), "No such command 'shwo'."),
        (("generate", "a", "--max-new-tokens", "many"), "Invalid value for '--max-new-tokens': "),
    ],
)
def test_words_that_no_command_takes_are_told_as_json_too(slideformer, words, expected) -> None:
    done = slideformer(*words, "--json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["exit_code"] == 2 and found["error"].startswith(expected)
    assert f"Error: {expected}" in done.stderr
    assert slideformer(*words).stdout == ""
