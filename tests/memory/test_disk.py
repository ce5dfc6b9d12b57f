"""The store on disk gives back what was written, from any memory, from several threads, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memory.pages import BLOCK, noise, on_a_page
from slideformer.errors import BadInput
from slideformer.memory import DiskFault, DiskFolder, padded
from slideformer.memory.disk import Traffic
from slideformer.memory.disk_direct import resident_nbytes_of
from slideformer.memory.disk_stand_in import StandInDisk
from slideformer.native import NativeDisk

MIB = 1 << 20


@pytest.fixture(params=["native", "stand-in"])
def opened(request, monkeypatch, tmp_path: Path) -> Callable[..., DiskFolder]:
    """Opens tmp_path / d on threads of the native library, and as on a machine that has none."""
    expected = NativeDisk if request.param == "native" else StandInDisk
    if request.param == "stand-in":
        monkeypatch.setattr("slideformer.native.loader._places", lambda: [])

    def make(**settings: int) -> DiskFolder:
        folder = DiskFolder(tmp_path / "d", **settings)
        assert type(folder.threads) is expected
        return folder

    return make


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4096 + 7])
@pytest.mark.parametrize("off", [0, 64])
def test_what_was_written_is_read(opened, tmp_path: Path, nbytes: int, off: int) -> None:
    with opened(threads=3, block_nbytes=BLOCK) as folder:
        file = folder.file("a", [10, nbytes, 20])
        assert file.nbytes == folder.nbytes == (tmp_path / "d" / "a").stat().st_size == 5 * 4096 + padded(nbytes)
        for write in range(2):
            source, target = noise(nbytes, write, off=off), on_a_page(nbytes, off=64 - off)
            file.write(1, source)
            file.read(1, target)
            assert torch.equal(target, source)
        assert folder.writes.nbytes == folder.reads.nbytes == 2 * nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_every_dtype_moves_bit_for_bit(opened, dtype: torch.dtype) -> None:
    values = noise(9000 * dtype.itemsize, 0).view(dtype)  # NaN among them
    with opened() as folder:
        file = folder.file("a", [values.nbytes])
        file.write(0, values)
        read = torch.empty_like(values)
        file.read(0, read)
    assert torch.equal(read.view(torch.uint8), values.view(torch.uint8))


def test_a_read_touches_nothing_behind_its_target(opened) -> None:
    with opened() as folder:
        file = folder.file("a", [5000])
        file.write(0, noise(5000, 0))
        whole = on_a_page(3 * 4096).fill_(7)
        file.read(0, whole[:5000])
    assert (whole[5000:] == 7).all()


def test_what_lies_behind_the_end_of_the_data_does_not_matter(opened) -> None:
    """A device writes data alone, so the rest of its last page is what was there before."""
    with opened() as folder:
        file, target = folder.file("a", [5000]), on_a_page(5000)
        file.write(0, noise(5000, 0))
        with file.path.open("r+b") as other:
            other.seek(4096 + 5000)
            other.write(b"left over")
            os.fsync(other.fileno())
        file.read(0, target)
    assert torch.equal(target, noise(5000, 0))


def test_without_kvikio_gds_is_refused_in_a_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(
        BadInput, match=r"GPUDirect Storage needs kvikio \(.*\): pip install 'slideformer\[gds\]', or leave"
    ):
        DiskFolder(tmp_path / "d", gds=True)
    assert not (tmp_path / "d").exists()


def test_lanes_read_and_write_at_once(opened) -> None:
    failures: list[BaseException] = []
    with opened(threads=4, block_nbytes=BLOCK) as folder:
        file = folder.file("a", [10 * BLOCK + 100] * 4)

        def lane(extent: int) -> None:
            try:
                target = on_a_page(10 * BLOCK + 100)
                for turn in range(20):
                    source = noise(10 * BLOCK + 100, 100 * extent + turn)
                    file.write(extent, source)
                    file.read(extent, target)
                    assert torch.equal(target, source)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=lane, args=(extent,)) for extent in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_short_call_does_not_wait_for_all_of_a_long_one(tmp_path: Path) -> None:
    with DiskFolder(tmp_path / "d", threads=2, block_nbytes=BLOCK) as folder:
        file, data = folder.file("a", [16 * MIB, 100]), noise(16 * MIB, 0)
        file.write(1, data[:100])
        ended_s: dict[str, float] = {}

        def write() -> None:
            file.write(0, data)
            ended_s["long"] = time.perf_counter()

        long = threading.Thread(target=write)
        long.start()
        while folder.writes.running == 0:
            pass
        began_s = time.perf_counter()
        file.read(1, on_a_page(100))
        ended_s["short"] = time.perf_counter()
        long.join()
    assert ended_s["short"] - began_s < (ended_s["long"] - began_s) / 2  # a block behind two of 1,024


def test_an_extent_that_was_never_written_cannot_be_read(opened) -> None:
    with opened() as folder:
        file = folder.file("a", [100, 100])
        file.write(0, noise(100, 0))
        with pytest.raises(DiskFault, match=r"extent 1 of .*/d/a was never written: it cannot be read"):
            file.read(1, on_a_page(100))


def test_a_clean_end_leaves_nothing(opened, tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()} | set(os.listdir("/proc/self/task"))
    with opened() as folder:
        folder.file("a", [100]).write(0, noise(100, 0))
        assert {path.name for path in folder.path.iterdir()} == {"a", "slideformer.lock"}
    assert list(tmp_path.iterdir()) == []
    folder.close()
    assert {thread.name for thread in threading.enumerate()} | set(os.listdir("/proc/self/task")) <= before
    with pytest.raises(DiskFault, match="extent 0 of .*/a could not be written: the folder was closed"):
        folder._files["a"].write(0, noise(100, 0))


def test_what_is_kept_stays(opened, tmp_path: Path) -> None:
    with opened(keep=True) as folder:
        folder.file("a", [100])
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"a", "slideformer.lock"}


def test_a_folder_that_was_there_and_what_others_put_into_it_stay(opened, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with opened() as folder:
        folder.file("a", [100])
        folder.file("b", [100])
        (folder.path / "theirs").write_text("x")
        (folder.path / "b").unlink()
        (folder.path / "b").write_text("theirs too")
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"theirs", "b"}


def test_direct_io_leaves_nothing_in_the_page_cache(opened) -> None:
    """Where /tmp has no direct I/O, nothing can be said here: then test_without_direct_io is what holds."""
    with opened() as folder:
        file, data = folder.file("a", [8 * MIB]), noise(8 * MIB, 0)
        file.write(0, data)
        file.read(0, data)
        assert (resident_nbytes_of(file._file) == 0) is folder.direct


def test_without_direct_io_the_cost_is_told_once(caplog, tmp_path: Path) -> None:
    """tmpfs takes the flag and keeps all in memory, so that it is found out only by looking."""
    path = Path("/dev/shm") / f"slideformer-test-{os.getpid()}"
    with caplog.at_level(logging.WARNING), DiskFolder(path) as folder:
        assert not folder.direct
        file, data, read = folder.file("a", [9000]), noise(9000, 0), on_a_page(9000)
        file.write(0, data)
        file.read(0, read)
    assert torch.equal(read, data) and not path.exists()
    (record,) = caplog.records
    assert f"offload_dir {path} has no direct I/O: what is on disk also takes page cache" in record.getMessage()


def test_time_in_which_calls_overlap_counts_once(monkeypatch) -> None:
    clock = iter([1.0, 3.0, 4.0, 10.0, 20.0, 21.5])
    monkeypatch.setattr("slideformer.memory.disk.time.perf_counter", lambda: next(clock))
    traffic, told = Traffic(), []
    for change in (1, 1, -1, -1, 1, -1):
        traffic.note(change)
        told.append(traffic.busy_s)
    assert told == [0, 2, 3, 9, 9, 10.5]  # told also while calls follow without a gap


def test_time_is_counted_while_anything_moves(opened) -> None:
    with opened() as folder:
        file, data = folder.file("a", [MIB]), noise(MIB, 0)
        assert folder.writes.busy_s == folder.reads.busy_s == 0
        file.write(0, data)
        assert folder.writes.busy_s > 0 and folder.writes.nbytes == MIB and folder.reads.nbytes == 0
        file.read(0, data)
        assert folder.reads.busy_s > 0 and folder.reads.nbytes == MIB


@pytest.mark.parametrize("tensor", [torch.zeros(2, 50), torch.zeros(200)[::2], torch.zeros(100, device="meta")])
def test_a_tensor_that_is_no_row_of_host_memory_is_refused(opened, tensor) -> None:
    with opened() as folder:
        file = folder.file("a", [400])
        with pytest.raises(ValueError, match="must be 1-D, without gaps, host"):
            file.write(0, tensor)


def test_lengths_are_held_to_what_was_written(opened) -> None:
    with opened() as folder:
        file = folder.file("a", [400])
        with pytest.raises(ValueError, match="401 bytes for extent 0 of a, which has 400"):
            file.write(0, noise(401, 0))
        file.write(0, noise(300, 0))
        with pytest.raises(ValueError, match="400 bytes for extent 0 of a, 300 were written"):
            file.read(0, noise(400, 0))
