"""An exported folder is what transformers loads: the run's numbers, complete, with tokenizer, template and card."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slideformer.errors import BadInput, RunFailed
from slideformer.model import files, weights
from slideformer.train import trainer
from slideformer.train.console import PlainConsole
from slideformer.train.export import Source, export, find_source, gguf_command
from slideformer.train.output import claimed
from slideformer.train.save import companions
from slideformer.train.trainer import train
from train.toy import make_config, make_model, write_sums

GIGABYTE = 10**9
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def run_to(folder: Path, model: Path, **fields: object) -> Path:
    """A run of four steps with checkpoints 2 and 4; its output_dir."""
    rows = write_sums(folder / "rows.jsonl", 24)
    config = make_config(model, rows, folder / "out", max_steps=4, save_steps=2, save_dtype="float32", **fields)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "check_parity", lambda *args, **settings: None)  # tests/model has it
        train(config, PlainConsole(io.StringIO()))
    return folder / "out"


@pytest.fixture(scope="module")
def trained(model_folder, tmp_path_factory) -> Path:
    """Not to be written to."""
    return run_to(tmp_path_factory.mktemp("run"), model_folder, val_size=4, eval_strategy="steps", eval_steps=2)


@pytest.fixture
def source(trained) -> Source:
    return find_source(trained / "checkpoint-4", None)


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transformers_loads_the_checkpoint_as_if_the_run_had_saved_it(source, trained, tmp_path, dtype) -> None:
    export(source, tmp_path / "to", dtype=dtype, max_shard_nbytes=GIGABYTE)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    config = json.loads((tmp_path / "to/config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.") and loaded.dtype == dtype
    ours, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "to", trained))
    assert {t.dtype for t in ours.values()} == {dtype}
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[name], whole[name].to(dtype)) for name in whole)
    expected = AutoModelForCausalLM.from_pretrained(trained, dtype=dtype)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, expected.eval()(ids).logits)


def test_what_is_frozen_and_has_one_plane_is_exported_too(model_folder, tmp_path) -> None:
    out = run_to(tmp_path, model_folder, bf16=True, freeze=r"layers\.1\.|embed")
    export(find_source(out / "checkpoint-4", None), tmp_path / "to", dtype=None, max_shard_nbytes=GIGABYTE)
    ours, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "to", out))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_small_shards_and_then_large_ones_leave_only_current_files(source, trained, tmp_path) -> None:
    first = export(source, tmp_path, dtype=None, max_shard_nbytes=100_000)
    assert len(first.sums) > 4
    assert files_in(tmp_path) == set(first.names)
    second = export(source, tmp_path, dtype=None, max_shard_nbytes=GIGABYTE)
    assert list(second.sums) == ["model.safetensors"]
    assert files_in(tmp_path) == set(second.names)
    again = export(find_source(tmp_path, None), tmp_path / "again", dtype=None, max_shard_nbytes=200_000)
    assert 1 < len(again.sums) < len(first.sums)
    ours = [load_file(tmp_path / "again" / name) for name in again.sums]
    whole = load_file(trained / "model.safetensors")
    assert all(torch.equal({k: v for one in ours for k, v in one.items()}[name], whole[name]) for name in whole)


def test_tokenizer_templates_and_generation_settings_are_the_sources(model_folder, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    out = run_to(tmp_path, model)
    saved = export(find_source(out / "checkpoint-2", None), tmp_path / "to", dtype=None, max_shard_nbytes=GIGABYTE)
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "to"))
    assert theirs.chat_template
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)
    generation = json.loads((tmp_path / "to/generation_config.json").read_text())
    assert generation["eos_token_id"] == [258, 257]
    assert "additional_chat_templates/tools.jinja" in saved.names
    assert (tmp_path / "to/additional_chat_templates/tools.jinja").read_text() == "{{ tools }}"


def test_the_card_tells_the_runs_facts_and_no_path(source, trained, tmp_path) -> None:
    export(source, tmp_path, dtype=torch.bfloat16, max_shard_nbytes=GIGABYTE)
    text = (tmp_path / "README.md").read_text()
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for expected in (
        "library_name: transformers",
        "# LlamaForCausalLM, 0.2 M parameters, bfloat16",
        "all of its parameters fine-tuned by slideformer",
        "| data | rows.jsonl |",
        "| steps | 4 |",
        f"| eval_loss | {metrics[-1]['eval_loss']:.6g} |",
        "| learning_rate | 0.001 |",
        f"torch {torch.__version__.partition('+')[0]}",
    ):
        assert expected in text, expected
    assert str(trained.parent) not in text
    assert "/tmp" not in text
    result = (trained / "README.md").read_text()  # the run's own result has the same
    assert "| steps | 4 |" in result and "M parameters, float32" in result


def test_somebody_elses_card_stays(source, tmp_path) -> None:
    (tmp_path / "README.md").write_text("mine")
    saved = export(source, tmp_path, dtype=None, max_shard_nbytes=GIGABYTE, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "README.md" not in saved.names


def test_a_file_that_the_disk_changed_is_found(source, tmp_path, monkeypatch) -> None:
    replace = weights._replace

    def rotting(folder, unfinished, written):
        replace(folder, unfinished, written)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    monkeypatch.setattr(weights, "_replace", rotting)
    with pytest.raises(RunFailed, match="model.safetensors does not read back as it was written"):
        export(source, tmp_path, dtype=None, max_shard_nbytes=GIGABYTE)


def test_a_run_whose_result_finds_no_room_says_how_to_get_it(config_for, monkeypatch) -> None:
    def full(path, fill):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_file", full)
        with pytest.raises(
            RunFailed, match="could not be written to .*: No space left on device; .* slideformer export"
        ):
            train(config_for(max_steps=1), PlainConsole(io.StringIO()))


# where from


def test_an_output_dir_gives_its_model_or_else_its_newest_complete_checkpoint(trained, tmp_path) -> None:
    assert find_source(trained, None).folder == trained
    shutil.copytree(trained, tmp_path / "out")
    for path in (tmp_path / "out").glob("*"):
        if path.is_file():
            path.unlink()
    assert find_source(tmp_path / "out", None).folder == tmp_path / "out/checkpoint-4"
    (tmp_path / "out/checkpoint-4/manifest.json").unlink()
    assert find_source(tmp_path / "out", None).folder == tmp_path / "out/checkpoint-2"
    shutil.rmtree(tmp_path / "out/checkpoint-2")
    with pytest.raises(BadInput, match="holds no model and no complete checkpoint"):
        find_source(tmp_path / "out", None)
    with pytest.raises(BadInput, match="there is no folder"):
        find_source(tmp_path / "nowhere", None)


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path) -> None:
    shutil.copytree(trained / "checkpoint-4", tmp_path / "broken")
    path = tmp_path / "broken/unit-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadInput, match="cannot be exported: unit-0001.safetensors does not have the checksum"):
        find_source(tmp_path / "broken", None)


def test_a_model_that_moved_is_asked_for_and_another_is_refused(model_folder, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    out = run_to(tmp_path, model)
    model.rename(tmp_path / "moved")
    with pytest.raises(BadInput, match="started from is not in .*: say where it is with --model"):
        find_source(out / "checkpoint-4", None)
    assert find_source(out / "checkpoint-4", tmp_path / "moved").model == tmp_path / "moved"
    other = make_model(tmp_path / "other", rms_norm_eps=1e-5)
    with pytest.raises(BadInput, match="is not the model that .* is of: config.json: rms_norm_eps was 1e-06"):
        find_source(out / "checkpoint-4", other)


def test_the_target_is_neither_the_source_nor_in_use(source, trained, tmp_path) -> None:
    with pytest.raises(BadInput, match="the target, .* is where the weights come from"):
        export(source, trained / "checkpoint-4", dtype=None, max_shard_nbytes=GIGABYTE)
    with pytest.raises(BadInput, match="the target, .* is where the weights come from"):
        export(source, source.model, dtype=None, max_shard_nbytes=GIGABYTE)
    with claimed(tmp_path), pytest.raises(BadInput, match="another process is writing to"):
        export(source, tmp_path, dtype=None, max_shard_nbytes=GIGABYTE)


def test_a_link_out_of_the_model_folder_is_not_followed_and_the_hubs_cache_is(tmp_path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.txt").symlink_to(secret)
    with pytest.raises(BadInput, match="vocab.txt leads out of its folder, to .*id_rsa"):
        companions(model)
    (model / "vocab.txt").unlink()
    (model / "additional_chat_templates").symlink_to(tmp_path)
    (tmp_path / "a.jinja").write_text("secret")
    with pytest.raises(BadInput, match="a.jinja leads out of its folder"):
        companions(model)
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    (tmp_path / "models--a--b/blobs/77").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/77")
    assert companions(snapshot) == [snapshot / "tokenizer.json"]


def test_the_command_for_llama_cpp_names_the_type(tmp_path) -> None:
    expected = f"python llama.cpp/convert_hf_to_gguf.py {tmp_path} --outfile {tmp_path.name}-bf16.gguf --outtype bf16"
    assert gguf_command(tmp_path, torch.bfloat16) == expected
    assert gguf_command(tmp_path, torch.float32).endswith("-f32.gguf --outtype f32")
