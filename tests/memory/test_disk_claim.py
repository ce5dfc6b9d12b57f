"""Whose a folder is: one run's at a time, and after a killed one nobody's, unless all it left may go."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.pages import noise
from slideformer.errors import BadInput
from slideformer.memory import DiskFolder
from slideformer.memory.disk_found import take_over

NBYTES = 10000


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[int]:
    """A process that has tmp_path / d, with a file in it, and does nothing more."""
    ready, told = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(100)
        DiskFolder(tmp_path / "d").file("a", [1 << 20])
        os.write(told, b"x")
        signal.pause()
    assert os.read(ready, 1) == b"x"
    os.close(ready), os.close(told)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_two_runs_do_not_share_a_folder(other_run: int, tmp_path: Path) -> None:
    text = (
        rf"offload_dir .*/d is used by a run that is at work \(process {other_run} on \S+ since \S+\): wait for its end"
    )
    for _ in range(2):
        with pytest.raises(BadInput, match=text):
            DiskFolder(tmp_path / "d")
    assert (tmp_path / "d" / "a").exists()


def test_what_a_killed_run_left_is_told_and_not_touched(other_run: int, tmp_path: Path) -> None:
    os.kill(other_run, signal.SIGKILL)
    os.waitid(os.P_PID, other_run, os.WEXITED | os.WNOWAIT)
    text = (
        r"offload_dir .*/d holds 0\.00 GiB of a run that was killed "
        rf"\(process {other_run} on \S+ since \S+, last written \d{{{{4}}}}-\d\d-\d\d \d\d:\d\d\): "
        r"nothing goes on from them \(a checkpoint has its own\): remove them with `{}`, {}or choose another$"
    )
    folder = tmp_path / "d"
    with pytest.raises(BadInput, match=text.format(f"rm -r {folder}", "set reuse_offload_dir: true, ")):
        DiskFolder(folder)
    assert (folder / "a").exists()
    (folder / "it's theirs").write_text("")
    with pytest.raises(BadInput, match=text.format(f"rm {folder}/a {folder}/slideformer.lock", "")) as told:
        DiskFolder(folder)
    subprocess.run(str(told.value).split("`")[1], shell=True, check=True)
    assert [path.name for path in folder.iterdir()] == ["it's theirs"]


def test_what_a_killed_run_left_is_taken_over_where_that_is_allowed(other_run: int, tmp_path: Path, caplog) -> None:
    os.kill(other_run, signal.SIGKILL)  # and not waited for: its lock goes when the kernel is through with it
    with DiskFolder(tmp_path / "d", reuse=True) as folder:
        assert {path.name for path in folder.path.iterdir()} == {"slideformer.lock"}
        assert f"is taken over: 0.00 GiB that a killed run (process {other_run} on " in caplog.text
        folder.file("a", [NBYTES]).write(0, noise(NBYTES, 0))
        with pytest.raises(BadInput, match=rf"used by a run that is at work \(process {os.getpid()} on"):
            DiskFolder(tmp_path / "d")
    assert not (tmp_path / "d").exists(), "it was the killed run that made it, and nobody else's"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "b").write_text("theirs"),
        lambda d: ((d / "a").rename(d.parent / "a"), (d / "a").write_text("theirs")),
        lambda d: (d / "slideformer.lock").write_text("{}"),
        lambda d: (d / "slideformer.lock").write_text((d / "slideformer.lock").read_text().replace("locked", "wrong")),
    ],
    ids=["another file", "a file in the place of one", "another claim", "a claim that was not locked"],
)
def test_nothing_is_taken_over_where_the_claim_does_not_list_all_there_is(other_run, tmp_path: Path, change) -> None:
    os.kill(other_run, signal.SIGKILL)
    os.waitid(os.P_PID, other_run, os.WEXITED | os.WNOWAIT)
    change(tmp_path / "d")
    before = {path: path.stat().st_ino for path in (tmp_path / "d").iterdir()}
    with pytest.raises(BadInput, match="holds 0.00 GiB of a run that was killed"):
        DiskFolder(tmp_path / "d", reuse=True)
    assert {path: path.stat().st_ino for path in (tmp_path / "d").iterdir()} == before


def test_a_run_that_was_killed_before_it_could_say_anything_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "slideformer.lock").touch()
    with DiskFolder(tmp_path / "d", reuse=True) as folder:
        folder.file("a", [NBYTES]).write(0, noise(NBYTES, 0))
    assert list((tmp_path / "d").iterdir()) == [], "nobody knows who made the folder, so it stays"


def test_nothing_is_taken_over_while_another_holds_the_claim(other_run: int, tmp_path: Path) -> None:
    os.kill(other_run, signal.SIGKILL)
    os.waitid(os.P_PID, other_run, os.WEXITED | os.WNOWAIT)
    with (tmp_path / "d" / "slideformer.lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another run has just taken offload_dir"):
            take_over(tmp_path / "d")
    assert (tmp_path / "d" / "a").exists()


def test_what_was_kept_on_purpose_is_not_taken_over(tmp_path: Path) -> None:
    with DiskFolder(tmp_path / "d", keep=True) as folder:
        folder.file("a", [NBYTES])
    with pytest.raises(BadInput, match=r"of a run that kept its files .* remove them with `rm -r \S+/d`, or choose"):
        DiskFolder(tmp_path / "d", reuse=True)
    assert (tmp_path / "d" / "a").exists()


def test_a_run_at_work_is_waited_for_and_then_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("slideformer.memory.disk_claim.WAIT_S", 0.5)
    with DiskFolder(tmp_path / "d") as first:
        first.file("a", [NBYTES])
        began_s = time.monotonic()
        with pytest.raises(BadInput, match="is used by a run that is at work"):
            DiskFolder(tmp_path / "d", reuse=True)
        assert time.monotonic() - began_s >= 0.5
        monkeypatch.setattr("slideformer.memory.disk_claim.WAIT_S", 20)
        closing = threading.Timer(0.3, first.close)
        closing.start()
        with DiskFolder(tmp_path / "d", reuse=True) as second:
            closing.join()
            second.file("a", [NBYTES]).write(0, noise(NBYTES, 0))


def test_of_two_that_would_take_over_one_does(other_run: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("slideformer.memory.disk_claim.WAIT_S", 0.2)
    os.kill(other_run, signal.SIGKILL)
    os.waitid(os.P_PID, other_run, os.WEXITED | os.WNOWAIT)
    told: list[DiskFolder | BadInput] = []
    together = threading.Barrier(4)

    def take() -> None:
        together.wait()
        try:
            told.append(DiskFolder(tmp_path / "d", reuse=True))
        except BadInput as error:
            told.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder,) = (one for one in told if isinstance(one, DiskFolder))
    folder.file("a", [NBYTES]).write(0, noise(NBYTES, 0))
    folder.close()
    assert len(told) == 4 and not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda d: d.write_text("x"), "is a file: choose a folder that is not there yet"),
        (lambda d: (d.mkdir(), (d / "x").write_text("")), r"has other files in it \(x\): choose a folder that is not"),
        (lambda d: (d.mkdir(), (d / "x").mkdir(), (d / "y").mkdir()), r"has other files in it \(x and more\)"),
        (
            lambda d: (d.mkdir(), (d / "slideformer.lock").write_text("?")),
            r"was killed \(which one is not known, la",
        ),
    ],
)
def test_what_is_somebody_elses_is_refused_and_stays(tmp_path: Path, prepare, text: str) -> None:
    prepare(tmp_path / "d")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=f"offload_dir .*/d .*{text}"):
        DiskFolder(tmp_path / "d")
    assert sorted(tmp_path.rglob("*")) == before
