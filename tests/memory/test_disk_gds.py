"""How pieces between a file and a device are begun, waited for and summed. kvikio needs a driver even for the host's
memory, so threads of Python's play it here; tests/gpu/test_gds.py has the real one."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from memory.pages import noise
from slideformer.cli.doctor import _disk
from slideformer.device.cpu import CpuDevice
from slideformer.memory.disk_extent import checksum, padded
from slideformer.memory.disk_gds import PIECE_NBYTES, GdsFile, device_checksum
from slideformer.native import ShortFile

SIZES = [0, 1, 4097, PIECE_NBYTES, 2 * PIECE_NBYTES + 5000]
OFFSET = 4096


class Waiting:
    def __init__(self, future: Future[int]) -> None:
        self._future, self._asked = future, False

    def get(self) -> int:
        assert not self._asked, "kvikio's futures can be asked once"
        self._asked = True
        return self._future.result()


class Threads:
    """Reads and writes a file as kvikio's CuFile does, later and in any order. slow_s: each piece. broken: at this
    offset."""

    def __init__(self, path: Path, *, slow_s: float = 0.0, broken: int = -1) -> None:
        self._file, self._pool = os.open(path, os.O_RDWR | os.O_CREAT), ThreadPoolExecutor(3)
        self._slow_s, self._broken, self.at_work = slow_s, broken, 0
        self._lock = threading.Lock()

    def pread(self, data: torch.Tensor, *, file_offset: int) -> Waiting:
        return self._begun(os.preadv, data, file_offset)

    def pwrite(self, data: torch.Tensor, *, file_offset: int) -> Waiting:
        return self._begun(os.pwritev, data, file_offset)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def _begun(self, call, data: torch.Tensor, offset: int) -> Waiting:
        self._note(1)
        return Waiting(self._pool.submit(self._move, call, data, offset))

    def _move(self, call, data: torch.Tensor, offset: int) -> int:
        try:
            time.sleep(self._slow_s)
            if offset == self._broken:
                raise RuntimeError("KvikIO failure at: file.cpp:1: the disk errs")
            return call(self._file, [data.numpy()], offset)
        finally:
            self._note(-1)

    def _note(self, change: int) -> None:
        with self._lock:
            self.at_work += change


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_was_written_is_read_and_summed_piece_by_piece(tmp_path: Path, nbytes: int) -> None:
    threads = Threads(tmp_path / "a", slow_s=0.01)
    file, source, target = GdsFile(threads), noise(nbytes, 1), torch.zeros(nbytes, dtype=torch.uint8)
    expected = checksum(memoryview(bytes(source.numpy()).ljust(padded(nbytes), b"\0")), 0)
    with file.write(OFFSET, source):
        assert device_checksum(source) == expected
    assert threads.at_work == 0
    with file.read(OFFSET, target) as moving:
        assert device_checksum(target, moving.wait) == expected
    assert torch.equal(target, source)
    file.close()


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_piece_that_fails_is_told_when_all_have_ended(tmp_path: Path, call: str, sums: bool) -> None:
    (tmp_path / "a").write_bytes(bytes(OFFSET + 4 * PIECE_NBYTES))
    threads = Threads(tmp_path / "a", slow_s=0.02, broken=OFFSET + PIECE_NBYTES)
    file, data = GdsFile(threads), torch.zeros(4 * PIECE_NBYTES, dtype=torch.uint8)
    with pytest.raises(OSError, match="the disk errs"):
        with getattr(file, call)(OFFSET, data) as moving:
            if sums:
                device_checksum(data, moving.wait)
    assert threads.at_work == 0
    file.close()


def test_whatever_else_fails_comes_first_and_nothing_moves_any_more(tmp_path: Path) -> None:
    threads = Threads(tmp_path / "a", slow_s=0.05, broken=OFFSET)
    file = GdsFile(threads)
    with pytest.raises(KeyboardInterrupt):
        with file.write(OFFSET, noise(3 * PIECE_NBYTES, 0)):
            raise KeyboardInterrupt
    assert threads.at_work == 0
    file.close()


def test_a_file_that_was_cut_is_short(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(OFFSET + PIECE_NBYTES + 10))
    file, data = GdsFile(Threads(tmp_path / "a")), torch.zeros(2 * PIECE_NBYTES, dtype=torch.uint8)
    with pytest.raises(ShortFile, match=f"{PIECE_NBYTES - 10} bytes of piece 1 are missing"):
        with file.read(OFFSET, data) as moving:
            device_checksum(data, moving.wait)
    file.close()


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize(
    ("refuses", "told"), [(RuntimeError("KvikIO failure"), OSError), (KeyboardInterrupt("stop"), None)]
)
def test_where_a_piece_cannot_be_begun_those_before_it_end_first(tmp_path: Path, call, refuses, told) -> None:
    """The caller may give their memory to something else."""
    (tmp_path / "a").write_bytes(bytes(OFFSET + 3 * PIECE_NBYTES))

    class Refusing(Threads):
        def _begun(self, move, data: torch.Tensor, offset: int) -> Waiting:
            if offset == OFFSET + 2 * PIECE_NBYTES:
                raise refuses
            return super()._begun(move, data, offset)

    threads = Refusing(tmp_path / "a", slow_s=0.05, broken=OFFSET + PIECE_NBYTES)  # which is not what is told
    file = GdsFile(threads)
    with pytest.raises(told or type(refuses), match=str(refuses)):
        getattr(file, call)(OFFSET, torch.zeros(3 * PIECE_NBYTES, dtype=torch.uint8))
    assert threads.at_work == 0
    file.close()


def test_doctor_says_that_it_could_not_measure_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    """A file system that kvikio cannot open files on. Its module is played here, too."""

    def refuse(path: Path, flags: str) -> None:
        raise RuntimeError("KvikIO failure at: file.cpp:1: no such file system")

    module = ModuleType("kvikio")
    module.CuFile = refuse
    module.defaults = SimpleNamespace(set=lambda settings: None, is_compat_mode_preferred=lambda: False)
    module.cufile_driver = SimpleNamespace(get=lambda name: True)
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setattr(CpuDevice, "kind", "cuda")
    with CpuDevice() as device:
        facts = _disk(tmp_path, device)
    assert re.fullmatch(
        r"real, but it could not be measured \(.* cannot be opened by kvikio \(.*\): .*\)", facts["gds"]
    )
    assert facts["read_gbps"] > 0 and list(tmp_path.iterdir()) == []
