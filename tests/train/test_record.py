"""What is said of a run: of its data before the first step, and in run.json of the machine and the code around it."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest

from slideformer.train.console import PlainConsole
from slideformer.train.trainer import train
from train.test_trainer import run
from train.toy import write_sums


def recorded(config) -> dict:
    train(config, PlainConsole(io.StringIO()))
    return json.loads(Path(config.output_dir, "run.json").read_text())


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    done = subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_run_json_names_the_commit_around_the_run_and_whether_files_differ(config_for, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert recorded(config_for(max_steps=1))["git"] is None
    git(folder, "init")
    (folder / "notes.txt").write_text("one")
    git(folder, "add", "notes.txt")
    git(folder, "commit", "-m", "one")
    commit = git(folder, "rev-parse", "HEAD")
    assert recorded(config_for(max_steps=1))["git"] == commit
    (folder / "notes.txt").write_text("two")
    assert recorded(config_for(max_steps=1))["git"] == f"{commit}+"


def test_run_json_names_the_hardware(config_for, tmp_path, monkeypatch) -> None:
    driver = tmp_path / "bin/nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\necho 'NVIDIA L4, 23034 MiB, 570.1'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=os.pathsep)
    found = recorded(config_for(max_steps=1))["hardware"]
    assert found["gpus"] == ["NVIDIA H200, 143771 MiB, 570.1", "NVIDIA L4, 23034 MiB, 570.1"]
    assert 1 <= found["cpus"] <= len(os.sched_getaffinity(0))  # a container may be given fewer
    whole_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 0 < found["host_memory_gib"] <= whole_gib + 0.05
    assert found.get("cpu", "") in Path("/proc/cpuinfo").read_text()
    driver.write_text("#!/bin/sh\nexit 9\n")  # as without a driver
    assert "gpus" not in recorded(config_for(max_steps=1))["hardware"]


def test_what_became_of_the_rows_is_told_before_the_first_step(config_for, tmp_path) -> None:
    rows = write_sums(tmp_path / "rows.jsonl", 6)
    with rows.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "no answer"}]}) + "\n")
    out = io.StringIO()
    train(config_for(max_steps=1), PlainConsole(out))
    before, _, _ = out.getvalue().partition("step 1/1:")
    assert f"{rows}: 6 of 7 rows for training, " in before
    assert "1 row (7)" in before


def test_an_evaluation_on_a_split_of_a_folder_is_one_on_its_file(config_for, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, split in enumerate(("train", "validation", "test")):
        write_sums(folder / f"{split}.jsonl", 8 + seed, seed=seed)
    train_rows = {"path": str(folder), "split": "train"}

    def losses(evaluation: object) -> list[float]:
        lines = run(config_for(max_steps=2, dataset=train_rows, eval_dataset=evaluation))
        return [line["eval_loss"] for line in lines if "eval_loss" in line] + [lines[0]["loss"]]

    by_split = {name: losses({"path": str(folder), "split": name}) for name in ("validation", "test")}
    assert by_split == {name: losses(str(folder / f"{name}.jsonl")) for name in by_split}
    assert by_split["validation"][:-1] != pytest.approx(by_split["test"][:-1], rel=1e-6)
