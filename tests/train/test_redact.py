"""No token reaches a file that is kept or published."""

from __future__ import annotations

import io
import json

import pytest

from slideformer.train.console import PlainConsole
from slideformer.train.record import RunRecord
from slideformer.train.redact import redacted
from slideformer.train.trainer import train

HUB = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    "text",
    [
        HUB,
        f"401 for {HUB}, try again",
        "sk-proj-" + "x1" * 12,
        "ghp_" + "9z" * 18,
        "github_pat_" + "9z_" * 10,
        "AKIA" + "ABCD1234" * 2,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    ],
)
def test_what_has_the_form_of_a_token_is_hidden(text) -> None:
    secret = max(text.replace(",", " ").split(), key=len)
    found = redacted({"a": [text, {secret: 1}], "b": (text,)})
    assert secret not in json.dumps(found)
    assert "***" in json.dumps(found)


def test_a_password_in_an_address_is_hidden_and_the_rest_stays() -> None:
    assert redacted("https://me:pass1234@proxy.example/x?y=z") == "https://***@proxy.example/x?y=z"
    assert redacted("https://example.org/a:b@c") == "https://example.org/a:b@c"


def test_the_value_of_a_variable_that_holds_a_secret_is_hidden_wherever_it_turns_up(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "plainlooking99")
    monkeypatch.setenv("MY_DB_PASSWORD", "correct horse")
    monkeypatch.setenv("CI_TOKEN_FILE", str(tmp_path))
    monkeypatch.setenv("SOME_TOKEN", "1")
    text = f"plainlooking99 and correct horse, 1 step, {tmp_path}"
    assert redacted(text) == f"*** and ***, 1 step, {tmp_path}"


def test_ordinary_settings_stay_as_they_are(config_for) -> None:
    config = config_for().model_dump(mode="json")
    assert redacted(config) == config


def test_a_checkpoint_holds_no_secret_and_can_be_continued(config_for, tmp_path) -> None:
    config = config_for(max_steps=2, save_steps=1, hub_model_id=HUB)
    train(config, PlainConsole(io.StringIO()))
    assert HUB not in (tmp_path / "out/checkpoint-1/trainer.json").read_text()
    told = io.StringIO()
    train(config_for(max_steps=2, save_steps=1, hub_model_id=HUB, resume_from_checkpoint="auto"), PlainConsole(told))
    assert "going on from" in told.getvalue()


def test_run_json_holds_no_secret(config_for, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-in-the-usual-form")
    config = config_for(dataset=f"/data/{HUB}/rows.jsonl")
    RunRecord(tmp_path, config).write("failed", error="the hub refused not-in-the-usual-form", last_metrics={})
    text = (tmp_path / "run.json").read_text()
    assert HUB not in text and "not-in-the-usual-form" not in text
    assert json.loads(text)["error"] == "the hub refused ***"
