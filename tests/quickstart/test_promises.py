"""The quickstart's own data and config, and that it says so when a promise does not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slideformer.cli.config_file import load_config


def test_the_config_is_an_ordinary_one_with_a_window_of_two(root) -> None:
    resolved = load_config(root / "examples/quickstart.yaml")
    assert resolved.notices == ()
    assert resolved.config.window == 2
    assert resolved.config.output_dir == "runs/quickstart"
    paths = [spec.path for spec in (*resolved.config.dataset, *resolved.config.eval_dataset.values())]
    assert all(path.startswith((".cache/quickstart/", "examples/quickstart/")) for path in paths)


def test_held_out_questions_are_not_trained_on_and_their_answers_are_right(quickstart, root) -> None:
    trained = quickstart.read_rows(root / "examples/quickstart/persona.jsonl")
    held_out = quickstart.read_rows(root / quickstart.HELD_OUT)
    questions = [row["messages"][0]["content"] for row in trained]
    assert len(set(questions)) == len(questions) >= 40
    assert len(held_out) == 10
    for row in held_out:
        asked, answered = (message["content"] for message in row["messages"])
        assert asked not in questions
        assert quickstart.is_right(row, answered)
        assert not quickstart.is_right(row, "I am SmolLM.")


GOOD = {
    "loss": (2.0, 1.0),
    "persona": (3.0, 0.5),
    "general": (1.6, 1.7),
    "before": 1,
    "after": 6,
    "reloaded": 0.5,
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"loss": (1.0, 1.0)}, 1),
        ({"persona": (3.0, 3.0)}, 1),
        ({"general": (1.6, 1.73)}, 1),
        ({"before": 2}, 1),
        ({"after": 5}, 1),
        ({"reloaded": 0.501}, 1),
        ({"reloaded": 0.501, "device": "cuda"}, 0),
        ({"reloaded": 0.52, "device": "cuda"}, 1),
    ],
)
def test_each_broken_promise_alone_makes_it_fail(quickstart, tmp_path, monkeypatch, change, code) -> None:
    case = {**GOOD, **change}
    lines = [{"eval_persona_loss": case["persona"][0], "eval_general_loss": case["general"][0]}]
    lines += [{"loss": case["loss"][i // 3], "host_mem_gib": 1.0} for i in range(6)]
    lines += [{"eval_persona_loss": case["persona"][1], "eval_general_loss": case["general"][1]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"device": case["device"], "memory": {"device": 1}}))
    monkeypatch.setattr(quickstart, "RESULT", Path(tmp_path))
    rows = [{"expected": ["yes"]}] * 10
    before = ["yes"] * case["before"] + ["no"] * (10 - case["before"])
    after = ["Yes."] * case["after"] + ["no"] * (10 - case["after"])
    assert quickstart.judge(rows, before, after, case["reloaded"]) == code
