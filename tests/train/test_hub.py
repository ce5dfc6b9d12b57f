"""A push that cannot work is refused at the start; one that fails at the end keeps the model and says what to do."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from slideformer.cli import main
from slideformer.errors import BadInput, RunFailed
from slideformer.train import hub
from slideformer.train.console import PlainConsole
from slideformer.train.hub import push, require_hub
from slideformer.train.trainer import train
from train import local_hub
from train.local_hub import Hub

TOKEN = "hf_" + "a" * 34


@pytest.fixture
def local(monkeypatch) -> Iterator[Hub]:
    """A hub on this machine. Large files go there as they did before xet, whose servers cannot be had here."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with local_hub.running(TOKEN) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        yield hub


def contents(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_a_name_that_no_repository_has_is_refused() -> None:
    with pytest.raises(BadInput, match=r"hub_model_id is 'a/b/c': .* write NAME or ORGANISATION/NAME"):
        require_hub("a/b/c")


def test_offline_and_no_token_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(BadInput, match="push_to_hub needs a token of the hub: log in with `hf auth login`"):
        require_hub("somebody/model")
    monkeypatch.setattr(hub, "get_token", lambda: "hf_x")
    require_hub("somebody/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="push_to_hub is true, and so is HF_HUB_OFFLINE"):
        require_hub("somebody/model")


def test_a_hub_that_refuses_is_quoted_with_the_way_to_try_again(local, tmp_path) -> None:
    local.refuses = "create"
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(RunFailed) as caught:
        push(tmp_path, ["model.safetensors"], "somebody/model", private=True)
    message = str(caught.value)
    assert message.startswith(f"the model is complete in {tmp_path} but could not be pushed to somebody/model (")
    assert "403" in message
    again = f"slideformer export {tmp_path} {tmp_path}-again --push-to-hub --hub-model-id somebody/model"
    assert message.endswith(f"try again with {again}")


def test_a_hub_that_does_not_answer_is_a_failure_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunFailed, match=r"could not be pushed to somebody/model \(.*refused"):
        push(tmp_path, [], "somebody/model", private=True)


@pytest.mark.parametrize("refuses", ["create", "preupload", "batch", "commit"])
def test_a_run_whose_push_is_refused_has_its_model_all_the_same(local, config_for, tmp_path, refuses) -> None:
    local.refuses = refuses
    with pytest.raises(RunFailed, match="the model is complete in .* but could not be pushed to somebody/model"):
        train(config_for(max_steps=1, push_to_hub=True, hub_model_id="somebody/model"), PlainConsole(io.StringIO()))
    assert json.loads((tmp_path / "out/run.json").read_text())["status"] == "finished"
    assert (tmp_path / "out/model.safetensors").is_file()
    assert not any(repository.files for repository in local.repositories.values())


def test_a_run_is_pushed_with_its_model_and_nothing_else(local, config_for, tmp_path) -> None:
    told = io.StringIO()
    config = config_for(max_steps=2, save_steps=1, push_to_hub=True, hub_model_id="somebody/model")
    train(config, PlainConsole(told))
    repository = local.repositories["somebody/model"]
    assert repository.private and repository.commits == ["Fine-tuned weights"]
    assert f"pushed to {local.address}/somebody/model" in told.getvalue()
    assert repository.files == contents(tmp_path / "out", repository.files)
    assert {"model.safetensors", "config.json", "generation_config.json", "README.md"} <= repository.files.keys()
    assert {"tokenizer.json", "tokenizer_config.json"} <= repository.files.keys()
    assert not {"run.json", "metrics.jsonl", "timeline.json", "loss.png"} & repository.files.keys()
    assert not any("checkpoint" in name for name in repository.files)
    for name, content in repository.files.items():
        (tmp_path / "fetched" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fetched" / name).write_bytes(content)
    fetched, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("fetched", "out"))
    assert all(map(torch.equal, fetched.state_dict().values(), ours.state_dict().values()))


def test_a_push_that_failed_is_made_by_the_command_that_was_told(
    local, config_for, tmp_path, monkeypatch, capsys
) -> None:
    local.refuses = "commit"
    with pytest.raises(RunFailed) as caught:
        train(config_for(max_steps=1, push_to_hub=True, hub_model_id="somebody/model"), PlainConsole(io.StringIO()))
    local.refuses = r"(?!)"
    monkeypatch.setattr("sys.argv", shlex.split(str(caught.value).partition("try again with ")[2]))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert f"pushed to {local.address}/somebody/model" in capsys.readouterr().out
    weights = local.repositories["somebody/model"].files["model.safetensors"]
    assert weights == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_public_one_is_asked_for_and_one_that_exists_stays_as_it_is(local, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    push(tmp_path, ["config.json"], "somebody/open", private=False)
    assert not local.repositories["somebody/open"].private
    push(tmp_path, ["config.json"], "somebody/open", private=True)
    assert not local.repositories["somebody/open"].private


def test_a_token_that_may_not_write_is_told(local, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    with pytest.raises(RunFailed, match="could not be pushed to somebody/model .*401"):
        push(tmp_path, [], "somebody/model", private=True)
