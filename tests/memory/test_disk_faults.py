"""Disks that err and files that somebody changes: one clear error, no hang, no wrong value, nobody else's files gone.

What the operating system itself gets wrong is played by a preloaded library, in a process of its own (bad_days.py).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memory.pages import BLOCK, noise, on_a_page
from slideformer.errors import BadInput, DoesNotFit
from slideformer.memory import DiskFault, DiskFile, DiskFolder, padded

NBYTES = 3 * BLOCK + 4096 + 7
EXTENT = 4096 + padded(NBYTES)  # with its header


@pytest.fixture(params=["native", "stand-in"])
def folder(request, monkeypatch, tmp_path: Path) -> Iterator[DiskFolder]:
    if request.param == "stand-in":
        monkeypatch.setattr("slideformer.native.loader._places", lambda: [])
    with DiskFolder(tmp_path / "d", threads=2, block_nbytes=BLOCK) as opened:
        yield opened


@pytest.fixture
def file(folder: DiskFolder) -> DiskFile:
    """Two extents, written twice."""
    made = folder.file("a", [NBYTES, NBYTES])
    for seed in (0, 1):
        for extent in (0, 1):
            made.write(extent, noise(NBYTES, 10 * extent + seed))
    return made


def poke(path: Path, offset: int, data: bytes) -> None:
    """As another process would: past the cache in the end."""
    with path.open("r+b") as other:
        other.seek(offset)
        other.write(data)
        other.flush()
        os.fsync(other.fileno())


def peek(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as other:
        other.seek(offset)
        return other.read(nbytes)


def fails(file: DiskFile, extent: int, text: str) -> None:
    with pytest.raises(DiskFault) as raised:
        file.read(extent, on_a_page(NBYTES))
    assert str(raised.value).startswith(f"extent {extent} of {file.path} ") and text in str(raised.value)


def holds(file: DiskFile, extent: int, seed: int) -> None:
    target = on_a_page(NBYTES)
    file.read(extent, target)
    assert torch.equal(target, noise(NBYTES, seed))


@pytest.mark.parametrize("at", [0, 1, 4096, 4096 + BLOCK + 5000, 4096 + NBYTES - 1])
def test_a_byte_that_somebody_changes_is_found(file: DiskFile, at: int) -> None:
    (old,) = peek(file.path, at, 1)
    poke(file.path, at, bytes([old ^ 4]))
    fails(
        file, 0, "is not what this run wrote: " + ("its header was overwritten" if at < 4096 else "its data was chan")
    )
    holds(file, 1, 11)
    file.write(0, noise(NBYTES, 5))
    holds(file, 0, 5)


@pytest.mark.parametrize("threads", ["native", "stand-in"])
def test_without_sums_only_headers_are_held_to_what_was_written(tmp_path: Path, monkeypatch, threads: str) -> None:
    if threads == "stand-in":
        monkeypatch.setattr("slideformer.native.loader._places", lambda: [])
    with DiskFolder(tmp_path / "d", threads=2, block_nbytes=BLOCK, sums=False) as folder:
        file, target = folder.file("a", [NBYTES]), on_a_page(NBYTES)
        file.write(0, noise(NBYTES, 0))
        holds(file, 0, 0)
        poke(file.path, 4096 + BLOCK, b"changed")
        file.read(0, target)
        assert bytes(target[BLOCK : BLOCK + 7].numpy()) == b"changed"
        poke(file.path, 0, b"changed")
        fails(file, 0, "its header was overwritten")


@pytest.mark.parametrize("nbytes", [0, 4096, 4096 + BLOCK, EXTENT - 1])
def test_a_file_that_somebody_cuts_is_found(file: DiskFile, nbytes: int) -> None:
    os.truncate(file.path, nbytes)
    fails(file, 0, f"could not be read: the file was cut to {nbytes} of {file.nbytes} bytes")
    fails(file, 1, "could not be read: the file was cut")


def test_an_older_file_that_somebody_puts_back_is_found(file: DiskFile) -> None:
    before = peek(file.path, 0, file.nbytes)
    file.write(0, noise(NBYTES, 2))
    poke(file.path, 0, before)
    fails(file, 0, "it holds write 2 where write 3 was the last: a write was lost, or undone")
    holds(file, 1, 11)


def test_a_block_of_an_older_write_is_found(file: DiskFile) -> None:
    before = peek(file.path, 4096 + BLOCK, BLOCK)
    file.write(0, noise(NBYTES, 2))
    poke(file.path, 4096 + BLOCK, before)
    fails(file, 0, "its data was changed")


def test_blocks_that_change_places_are_found(file: DiskFile) -> None:
    first, second = peek(file.path, 4096, BLOCK), peek(file.path, 4096 + BLOCK, BLOCK)
    poke(file.path, 4096, second + first)
    fails(file, 0, "its data was changed")


def test_another_extents_data_is_found(file: DiskFile) -> None:
    poke(file.path, 0, peek(file.path, file.nbytes // 2, file.nbytes // 2))
    fails(file, 0, "another extent's data is in its place")


def test_a_file_full_of_zeros_is_found(file: DiskFile) -> None:
    poke(file.path, 0, bytes(file.nbytes))
    fails(file, 0, "there are zeros where its header was")


def test_another_file_under_the_name_changes_nothing_and_stays(folder: DiskFolder, file: DiskFile) -> None:
    (folder.path / "other").write_bytes(bytes(file.nbytes))
    (folder.path / "other").rename(file.path)
    holds(file, 0, 1)
    folder.close()
    assert file.path.read_bytes() == bytes(file.nbytes)


def test_a_folder_that_somebody_removes_changes_nothing(folder: DiskFolder, file: DiskFile) -> None:
    shutil.rmtree(folder.path)
    holds(file, 0, 1)
    file.write(0, noise(NBYTES, 3))
    holds(file, 0, 3)
    with pytest.raises(BadInput, match=r"d/b cannot be made: No such file or directory: choose another offload_dir"):
        folder.file("b", [1])
    folder.close()


def test_more_than_the_disk_has_is_refused_before_any_of_it_is_taken(folder: DiskFolder, monkeypatch) -> None:
    text = r"d/b needs 1048576\.00 GiB and \d+\.\d\d GiB are free there: free some, choose another offload_dir, or keep"
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, nbytes: taken.append(nbytes))
    with pytest.raises(DoesNotFit, match=text):
        folder.file("b", [(1 << 50) - 4096])
    assert not (folder.path / "b").exists() and taken == []
    folder.file("b", [100])
    assert taken == [8192]


@pytest.fixture
def longest_file() -> Iterator[Callable[[int], None]]:
    """A file of this process may not reach beyond so many bytes: the system then refuses as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_creation_leaves_no_file(folder: DiskFolder, longest_file) -> None:
    longest_file(8192)
    with pytest.raises(DoesNotFit, match=r"d/b needs 0\.00 GiB and .* free some"):
        folder.file("b", [8192])
    assert not (folder.path / "b").exists()
    folder.file("b", [4096])


def test_a_disk_that_is_full_in_mid_write_costs_that_extent_alone(file: DiskFile, longest_file) -> None:
    longest_file(4096 + BLOCK + 4096)
    with pytest.raises(DiskFault, match="extent 0 of .*/a could not be written: File too large"):
        file.write(0, noise(NBYTES, 2))
    fails(file, 0, "is being written or could not be: it cannot be read")
    holds(file, 1, 11)


def test_a_folder_that_closes_ends_the_calls_that_are_at_work(folder: DiskFolder) -> None:
    file, data = folder.file("b", [400 * BLOCK] * 2), noise(400 * BLOCK, 0)
    ended: list[str] = []

    def lane(call: Callable[[int, torch.Tensor], None], extent: int) -> None:
        try:
            while True:
                call(extent, data)
        except DiskFault as fault:
            ended.append(str(fault))

    file.write(0, data)
    lanes = [threading.Thread(target=lane, args=work) for work in ((file.read, 0), (file.write, 1))]
    for thread in lanes:
        thread.start()
    while folder.reads.running + folder.writes.running < 2:
        pass
    folder.close()
    for thread in lanes:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert sorted(ended) == [
        f"extent 0 of {file.path} could not be read: the folder was closed",
        f"extent 1 of {file.path} could not be written: the folder was closed",
    ]
    assert not folder.path.exists()


@pytest.fixture(scope="module")
def bad_days(tmp_path_factory) -> dict[str, dict[str, dict[str, str]]]:
    """By kind of threads and fault: what came of a write and a read."""
    made = tmp_path_factory.mktemp("bad")
    shim, here = made / "shim.so", Path(__file__).parent
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    words = ["-shared", "-fPIC", "-O1", str(here / "disk_shim.cpp"), "-o", str(shim), "-ldl"]
    subprocess.run([compiler, *words], check=True)
    done = subprocess.run(
        [sys.executable, str(here / "bad_days.py"), str(shim), str(made / "d")],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert not (made / "d").exists()
    return json.loads(done.stdout)


@pytest.mark.parametrize("threads", ["native", "stand-in"])
@pytest.mark.parametrize("fault", ["short", "odd", "interrupted"])
def test_calls_that_stop_half_way_are_gone_on_with(bad_days, threads: str, fault: str) -> None:
    assert bad_days[threads][fault] == {"write": "done", "read": "done", "equal": "True", "after": "True"}


@pytest.mark.parametrize("threads", ["native", "stand-in"])
@pytest.mark.parametrize(("fault", "text"), [("eio", "Input/output error"), ("enospc", "No space left on device")])
def test_an_error_of_the_disk_is_told_and_its_extent_is_not_read(bad_days, threads: str, fault: str, text: str) -> None:
    told = bad_days[threads][fault]
    assert told["write"].startswith("DiskFault: extent 0 of ") and told["write"].endswith(
        f"could not be written: {text}"
    )
    assert told["read"].endswith("is being written or could not be: it cannot be read")
    assert told["after"] == "True"
    if fault == "eio":
        assert told["read of what is there"].endswith(f"could not be read: {text}")


@pytest.mark.parametrize("threads", ["native", "stand-in"])
def test_a_write_that_a_disk_forgets_is_found(bad_days, threads: str) -> None:
    told = bad_days[threads]["lost"]
    assert told["write"] == "done" and "where write 11 was the last: a write was lost, or undone" in told["read"]


def test_threads_that_cannot_be_started_are_told(bad_days) -> None:
    assert bad_days["threads"]["native"].startswith(
        "RunFailed: could not start 8 threads for the disk: raise the limit"
    )
    assert bad_days["threads"]["stand-in"].endswith("could not be written: can't start new thread")


def test_a_child_of_the_run_leaves_the_folder_to_it(folder: DiskFolder, file: DiskFile) -> None:
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            folder.close()
            file.read(0, on_a_page(NBYTES))
        except DiskFault:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    holds(file, 0, 1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"a/d cannot be made, there is no folder .*/a: mount the disk, make the folder, or"
    ):
        DiskFolder(tmp_path / "a" / "d")
    with pytest.raises(BadInput, match="cannot be made: File name too long: choose another"):
        DiskFolder(tmp_path / ("d" * 300))
    with pytest.raises(BadInput, match="/proc/d cannot be made: No such file or directory: choose another"):
        DiskFolder(Path("/proc/d"))  # whose parent is there
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"file/d cannot be made, there is no folder .*/file: mount the disk, make"):
        DiskFolder(tmp_path / "file" / "d")


def test_a_file_system_that_refuses_the_flag_is_used_through_the_cache(tmp_path: Path, monkeypatch, caplog) -> None:
    """Before Linux 6.6, tmpfs refused it."""
    real = os.open

    def refusing(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *rest, **more))  # the file is made, and then the flag refused
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    with DiskFolder(tmp_path / "d") as folder:
        assert not folder.direct and "has no direct I/O" in caplog.text
        file = folder.file("a", [NBYTES])
        file.write(0, noise(NBYTES, 0))
        holds(file, 0, 0)
    assert list(tmp_path.iterdir()) == []
