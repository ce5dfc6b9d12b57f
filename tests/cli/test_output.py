"""Output that nobody reads any more, that a full disk refuses, or that a terminal has no letters for."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from slideformer.cli import main
from train.toy import write_sums


def without_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")


@pytest.fixture
def run(tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """`slideformer WORDS` with this standard output -> (exit code, what standard error got)."""
    monkeypatch.chdir(tmp_path)

    def call(out: TextIO, *words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["slideformer", *map(str, words)])
        capfd.readouterr()
        with out, monkeypatch.context() as patched:
            patched.setattr("sys.stdout", out)
            with pytest.raises(SystemExit) as ended:
                main()
        return ended.value.code or 0, capfd.readouterr().err

    return call


@pytest.mark.parametrize(
    "words", [["--help"], ["config", "schema"], ["config", "show", "CONFIG"], ["preview", "CONFIG"]]
)
def test_a_command_whose_reader_has_gone_ends_without_a_word(run, yaml_for, words) -> None:
    given = [yaml_for() if word == "CONFIG" else word for word in words]
    code, said = run(without_reader(), *given)
    assert code == 141
    assert [line for line in said.splitlines() if not line.startswith("note:")] == []


@pytest.mark.parametrize("words", [["--help"], ["config", "show", "CONFIG"], ["plan", "CONFIG", "--json"]])
def test_a_command_whose_output_a_full_disk_refuses_says_so(run, yaml_for, words) -> None:
    code, said = run(full_disk(), *[yaml_for() if word == "CONFIG" else word for word in words])
    assert code == 1
    assert said.splitlines()[-1] == (
        "error: standard output cannot be written (No space left on device): make room, or send it elsewhere"
    )
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("out", "reason"), [(without_reader, "Broken pipe"), (full_disk, "No space left on device")], ids=["pipe", "disk"]
)
def test_training_goes_on_when_nobody_sees_it(run, yaml_for, tmp_path, caplog, out, reason) -> None:
    code, _ = run(out(), "train", yaml_for())
    assert code == 0
    assert [r.getMessage() for r in caplog.records if "unseen" in r.getMessage()] == [
        f"the run goes on unseen, because its output cannot be written ({reason}): see metrics.jsonl"
    ]
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_was_closed_before_is_nowhere(yaml_for, tmp_path, monkeypatch, capfd, closed) -> None:
    """As by `slideformer train config.yaml >&-`, where Python has None for it."""
    monkeypatch.chdir(tmp_path)
    beside = ["--json"] if closed == "stderr" else []
    for words, code in ((["train", yaml_for(max_steps=1), *beside], 0), (["train", "nowhere.yaml"], 2)):
        monkeypatch.setattr("sys.argv", ["slideformer", *map(str, words)])
        capfd.readouterr()
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(f"sys.{closed}", None)
            main()
        assert (ended.value.code or 0) == code
        out = capfd.readouterr().out
        assert closed == "stdout" or out == "" or json.loads(out)["status"] == "finished"
    assert (tmp_path / "out/model.safetensors").is_file()


def test_what_train_was_to_print_in_the_end_is_missed(run, yaml_for, tmp_path) -> None:
    code, said = run(full_disk(), "train", yaml_for(max_steps=1), "--json")
    assert code == 1 and "standard output cannot be written" in said
    assert (tmp_path / "out/model.safetensors").is_file()


def test_letters_that_a_terminal_lacks_are_no_error(run, yaml_for, tmp_path) -> None:
    rows = write_sums(tmp_path / "rows.jsonl", 2)
    rows.write_text(rows.read_text().replace('"user", "content": "', '"user", "content": "日本 '))
    screen = io.BytesIO()
    code, said = run(Kept(screen, encoding="latin-1"), "preview", yaml_for(dataset=rows), "--rows", 1)
    assert code == 0, said
    assert b"\\u65e5\\u672c" in screen.getvalue()


class Kept(io.TextIOWrapper):
    """Leaves what it has written to be looked at."""

    def close(self) -> None:
        self.flush()


def test_a_real_process_leaves_no_complaint_of_pythons_own(tmp_path) -> None:
    """Which it would make while it ends, of a buffer that cannot be flushed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONUNBUFFERED": ""}
    with without_reader() as out:
        words = [sys.executable, "-m", "slideformer", "config", "show", "model=m", "dataset=d"]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 141
    assert done.stderr.splitlines() == ["note: command line: model is taken as model_name_or_path"]


def test_a_terminal_that_goes_away_leaves_a_checkpoint(yaml_for, tmp_path) -> None:
    """The panel's writes fail from then on, and SIGHUP comes."""
    config = yaml_for(max_steps=1_000_000, save_steps=1_000_000)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "TERM": "xterm"}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-m", "slideformer", "train", str(config)], environment)
    seen = b""
    while b" 2/1,000,000" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
    (found,) = (tmp_path / "out").glob("checkpoint-*")
    assert (found / "manifest.json").is_file()
