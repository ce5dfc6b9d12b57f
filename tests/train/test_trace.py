"""What lanes did in some steps, on request; and what binds, in a sentence, every so many steps."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from slideformer.train.console import PlainConsole
from slideformer.train.trainer import train


@pytest.mark.parametrize(("steps", "shown", "runs"), [(8, 5, {0, 1, 2}), (2, 2, {0})])
def test_a_trace_has_the_first_ordinary_steps_and_a_picture_of_one(config_for, steps, shown, runs):
    config = config_for(max_steps=steps, trace=True)
    train(config, PlainConsole(io.StringIO()))
    events = json.loads((Path(config.output_dir) / "trace.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {event["args"]["run"] for event in work} == runs and min(event["ts"] for event in work) == 0
    assert {"compute", "upload", "download", "update"} <= {lanes[event["tid"]] for event in work}
    text = (Path(config.output_dir) / "trace.txt").read_text()
    assert text.startswith(f"step {shown}, and what runs beside it\n")
    assert re.search(r"^ +compute [.A-Z-]*F+[.A-Z-]*B", text, re.MULTILINE)


def test_no_trace_is_written_unasked(config_for):
    config = config_for(max_steps=2)
    train(config, PlainConsole(io.StringIO()))
    assert not list(Path(config.output_dir).glob("trace*"))


@pytest.mark.parametrize(("every", "sentences"), [(None, 1), (3, 4), (100, 1)])
def test_what_binds_is_said_after_the_first_steps_and_every_so_many(config_for, every, sentences):
    told = io.StringIO()
    train(config_for(max_steps=9, verdict_steps=every), PlainConsole(told))
    assert told.getvalue().count("a step takes") == sentences  # step 4, and with 3: 3, 6 and 9


@pytest.mark.parametrize(
    ("long_s", "changes", "count"), [(0.0, {}, 1), (0.0, {"save_steps": 9}, 0), (1800.0, {}, 0)], ids=str
)
def test_a_long_run_without_checkpoints_is_told_once_what_a_kill_would_cost(
    config_for, monkeypatch, long_s, changes, count
):
    monkeypatch.setattr("slideformer.train.loop.LONG_S", long_s)
    told = io.StringIO()
    train(config_for(max_steps=9, verdict_steps=2, **changes), PlainConsole(told))
    assert told.getvalue().count("to go without checkpoints: stopped or killed") == count
