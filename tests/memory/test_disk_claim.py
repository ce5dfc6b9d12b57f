"""Whose a folder is: one run's at a time, and after a killed one nobody's, unless all it left may go."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.pages import noise
from slideformer.errors import BadInput
from slideformer.memory import DiskFolder, disk_claim, disk_found
from slideformer.memory.disk_found import Whose, found_in, hold, take_over

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


@pytest.mark.parametrize("end", ["", "raise KeyError", "raise KeyboardInterrupt", "del folder", "folder.close()"])
def test_a_folder_that_nobody_closed_goes_when_python_ends(tmp_path: Path, end: str) -> None:
    """And not when a child ends that it forked."""
    text = f"""
import os
from pathlib import Path
from slideformer.memory import DiskFolder
path = Path({str(tmp_path / "d")!r})
folder = DiskFolder(path)
folder.file("a", [1 << 20])
if (child := os.fork()) == 0:
    raise SystemExit
os.waitpid(child, 0)
assert (path / "a").exists()
{end}
"""
    done = subprocess.run([sys.executable, "-c", text], timeout=100, capture_output=True, text=True)
    assert "AssertionError" not in done.stderr and (done.returncode != 0) == end.startswith("raise"), done.stderr
    assert not (tmp_path / "d").exists()


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
        rf"\(process {other_run} on \S+ since \S+, last written \d{{{{4}}}}-\d\d-\d\d \d\d:\d\d\){{}}: "
        r"nothing goes on from the run's files \(a checkpoint has its own\): remove them with `{}`, {}"
        r"or choose another$"
    )
    folder = tmp_path / "d"
    with pytest.raises(BadInput, match=text.format("", f"rm -r {folder}", "set reuse_offload_dir: true, ")):
        DiskFolder(folder)
    assert (folder / "a").exists()
    (folder / "it's theirs").write_text("")
    beside = r", and what is not that run's \(it's theirs\), so that reuse_offload_dir would remove nothing"
    text = text.format(beside, f"rm {folder}/a {folder}/slideformer.lock", "move the rest, ")
    with pytest.raises(BadInput, match=text) as told:
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


def relisted(folder: Path, name: str, inode: int | None) -> None:
    """The claim lists one more file."""
    claim = json.loads((folder / "slideformer.lock").read_text())
    claim["files"][name] = inode
    (folder / "slideformer.lock").write_text(json.dumps(claim))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "b").write_text("theirs"),
        lambda d: ((d / "a").rename(d.parent / "a"), (d / "a").write_text("theirs")),
        lambda d: (relisted(d, "b", None), (d / "b").mkdir()),
        lambda d: (relisted(d, "b", None), (d / "b").symlink_to(d / "a")),
        lambda d: ((d / "b").mkdir(), relisted(d, "b", (d / "b").stat().st_ino)),
        lambda d: (d / "slideformer.lock").write_text("{}"),
        lambda d: (d / "slideformer.lock").write_text((d / "slideformer.lock").read_text().replace("locked", "wrong")),
    ],
    ids=[
        "another file",
        "a file in the place of one",
        "a folder in the place of one to come",
        "a link in the place of one to come",
        "a folder that has the number of one",
        "another claim",
        "a claim that was not locked",
    ],
)
def test_nothing_is_taken_over_where_the_claim_does_not_list_all_there_is(other_run, tmp_path: Path, change) -> None:
    os.kill(other_run, signal.SIGKILL)
    os.waitid(os.P_PID, other_run, os.WEXITED | os.WNOWAIT)
    change(tmp_path / "d")
    before = {path: path.stat().st_ino for path in (tmp_path / "d").iterdir()}
    with pytest.raises(BadInput, match="holds 0.00 GiB of a run that was killed"):
        DiskFolder(tmp_path / "d", reuse=True)
    assert {path: path.stat().st_ino for path in (tmp_path / "d").iterdir()} == before
    assert not found_in(tmp_path / "d").goes and "set reuse" not in found_in(tmp_path / "d").sentence


def test_a_run_that_was_killed_before_it_could_say_anything_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "slideformer.lock").touch()
    with DiskFolder(tmp_path / "d", reuse=True) as folder:
        folder.file("a", [NBYTES]).write(0, noise(NBYTES, 0))
    assert list((tmp_path / "d").iterdir()) == [], "nobody knows who made the folder, so it stays"


@pytest.mark.parametrize("ended", [False, True], ids=["at work", "through with it"])
def test_a_run_whose_claim_another_takes_before_it_is_locked_is_refused(tmp_path: Path, monkeypatch, ended) -> None:
    """What it has made until then looks like what a run leaves that is killed just there."""
    path, taken = tmp_path / "d", []

    def held_up(path: Path, lock: int) -> bool:
        monkeypatch.undo()
        taken.append(DiskFolder(path, reuse=True))
        if ended:
            taken.pop().close()
        return hold(path, lock)

    monkeypatch.setattr(disk_claim, "hold", held_up)
    with pytest.raises(BadInput, match="another run has just taken offload_dir"):
        DiskFolder(path)
    for folder in taken:
        folder.file("a", [NBYTES]).write(0, noise(NBYTES, 0))
        assert found_in(path).whose is Whose.AT_WORK
        folder.close()
    assert list(path.iterdir() if path.exists() else []) == []


@pytest.mark.parametrize("then", [lambda lock: None, lambda lock: lock.touch()], ids=["gone", "another's"])
def test_a_claim_that_has_gone_since_it_was_opened_is_nobodys(tmp_path: Path, then) -> None:
    lock = tmp_path / disk_found.LOCK_NAME
    with lock.open("w+b") as held:
        assert hold(tmp_path, held.fileno())
        lock.unlink()
        then(lock)
        with pytest.raises(BadInput, match="another run has just taken offload_dir"):
            hold(tmp_path, held.fileno())


def test_a_claim_that_another_has_written_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    """By a run that took it over and was killed."""

    def held_up(path: Path, lock: int) -> bool:
        (path / disk_found.LOCK_NAME).write_text("{}")
        return hold(path, lock)

    monkeypatch.setattr(disk_claim, "hold", held_up)
    with pytest.raises(BadInput, match="another run has just taken offload_dir"):
        DiskFolder(tmp_path / "d")
    assert (tmp_path / "d" / disk_found.LOCK_NAME).read_text() == "{}"


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
