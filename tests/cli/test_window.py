"""A plan, a dry run and a run take the same window, and say why it is one block."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def limit(slideformer, yaml_for) -> str:
    """Of host memory: one block on the device fits, two do not."""
    needs = []
    for window in (1, 2):
        planned = json.loads(slideformer("plan", yaml_for(window=window), "--json").stdout)
        assert planned["window"] == window
        needs.append(planned["device_nbytes"] + planned["host_nbytes"])  # of a CPU both are the host's
    assert needs[0] < needs[1]
    return f"max_host_memory={needs[1] - 1}B"


def test_a_plan_a_dry_run_and_a_run_agree_on_one_block(slideformer, yaml_for, limit, caplog) -> None:
    config = yaml_for()
    assert json.loads(slideformer("plan", config, "--json").stdout)["window"] == 2
    assert json.loads(slideformer("plan", config, limit, "--json").stdout)["window"] == 1
    shown = slideformer("plan", config, limit).stdout
    assert "window of 1 block, since two have no room: " in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    dry = slideformer("train", config, limit, "--dry-run", "--json")
    assert json.loads(dry.stdout)["plan"]["window"] == 1
    done = slideformer("train", config, limit)
    assert done.returncode == 0, done.stderr
    assert "\non the device: 1 of 4 blocks at a time, " in done.stdout
    assert caplog.text.count("one block is on the device at a time, since two have no room") == 1


@pytest.mark.parametrize("command", [("plan",), ("train", "--dry-run"), ("train",)], ids=" ".join)
def test_a_window_that_was_given_stays_and_the_advice_is_true(slideformer, yaml_for, limit, command) -> None:
    done = slideformer(*command, yaml_for(window=2), limit)
    assert done.returncode == 3
    change = done.stderr.strip().rpartition("Cheapest change that makes it fit: ")[2]
    assert slideformer(*command, yaml_for(window=2), limit, *change.replace(": ", "=").split(", ")).returncode == 0
    assert "since two have no room" not in slideformer("plan", yaml_for(window=1)).stdout
