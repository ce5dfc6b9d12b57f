"""slideformer config, and what it prints read back."""

from __future__ import annotations

import json

import pytest
import yaml

from slideformer.config import TrainConfig


def test_init_writes_a_file_that_is_valid_and_never_replaces_one_by_itself(slideformer, tmp_path) -> None:
    done = slideformer("config", "init", "mine.yaml")
    assert (done.returncode, done.stdout) == (0, "mine.yaml is written: fill in the first two lines\n")
    text = (tmp_path / "mine.yaml").read_text()
    done = slideformer("config", "validate", "mine.yaml")
    assert (done.returncode, done.stdout) == (0, "valid: 1 epoch of 4 x 2 = 8 sequences, deferred updates\n")
    assert done.stderr == ""
    done = slideformer("config", "validate", "mine.yaml", "--json")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, {"valid": True}, "")
    (tmp_path / "mine.yaml").write_text("mine: 1")
    done = slideformer("config", "init", "mine.yaml")
    assert done.returncode == 2
    assert done.stderr == "error: mine.yaml is there already: give another name, or --force to replace it\n"
    done = slideformer("config", "init", "mine.yaml", "--force", "--json")
    assert json.loads(done.stdout) == {"written": "mine.yaml"}
    assert (tmp_path / "mine.yaml").read_text() == text
    done = slideformer("config", "init", "nowhere/mine.yaml")
    assert (
        done.stderr == "error: nowhere/mine.yaml cannot be written: No such file or directory: choose another place\n"
    )


def test_show_prints_every_key_resolved_and_can_be_read_back(slideformer, yaml_for, tmp_path) -> None:
    done = slideformer("config", "show", yaml_for(lr="3e-4"), "--max-gpu-memory", "24GiB")
    shown = yaml.safe_load(done.stdout)
    assert list(shown) == list(TrainConfig.model_fields)
    assert (shown["learning_rate"], shown["max_gpu_memory"]) == (3e-4, 24 * 2**30)
    (tmp_path / "again.yaml").write_text(done.stdout)
    again = slideformer("config", "show", "again.yaml", "--json")
    assert json.loads(again.stdout) == shown
    assert again.stderr == ""


def test_a_limit_below_a_mebibyte_reaches_the_run(slideformer, yaml_for, tmp_path) -> None:
    """A Trainer checks its config again, with the sizes as numbers."""
    done = slideformer("train", yaml_for(max_host_memory="200KiB"))
    assert done.returncode == 3
    assert "this run needs" in done.stderr
    assert "200.0 KiB of max_host_memory" in done.stderr
    done = slideformer("train", yaml_for(max_gpu_memory="200KiB", max_steps=1))  # which a CPU has no use for
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/run.json").read_text())["config"]["max_gpu_memory"] == "204800B"


@pytest.mark.parametrize("command", ["show", "validate"])
def test_a_wrong_key_is_told_with_file_and_line(slideformer, yaml_for, command) -> None:
    done = slideformer("config", command, yaml_for(lerning_rate=1), "--json")
    assert done.returncode == 2
    assert "train.yaml:9: unknown key lerning_rate: did you mean learning_rate?" in done.stderr
    assert json.loads(done.stdout) == {"error": done.stderr.strip().removeprefix("error: "), "exit_code": 2}


def test_schema_knows_every_key(slideformer) -> None:
    done = slideformer("config", "schema")
    schema = json.loads(done.stdout)
    assert slideformer("config", "schema", "--json") == done
    assert set(schema["properties"]) == set(TrainConfig.model_fields)
    assert schema["additionalProperties"] is False
    sizes = [schema["properties"][key]["anyOf"] for key in ("max_gpu_memory", "max_host_memory", "max_disk_writes")]
    assert [[kind["type"] for kind in size] for size in sizes] == 3 * [["integer", "string", "null"]]
