"""Extents move between files and a GPU's memory as they do between files and the host's. Needs kvikio; without it
tests/memory/test_disk.py says what is tried of the rest: sums, headers, and files; tests/engine/test_disk.py of a step
whose weights and saved inputs go straight to the device."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from gpu.test_disk_parity import EVERY, deterministic, layout_of, outcome  # noqa: F401
from memory.pages import noise, on_a_page
from slideformer.device.cuda import CudaDevice
from slideformer.memory import DiskFault, DiskFolder
from slideformer.memory.disk_extent import PAGE, checksum
from slideformer.memory.disk_gds import PIECE_NBYTES, device_checksum

kvikio = pytest.importorskip(
    "kvikio", reason="kvikio is not installed; tests/memory/test_disk.py covers files without it"
)

MIB = 1 << 20
SIZES = [1, 4095, 4096, 4097, MIB, 3 * MIB + 4096, 9 * MIB + 5]


@pytest.fixture
def folder(tmp_path: Path):
    with DiskFolder(tmp_path / "d", gds=True) as opened:
        print(f"GPUDirect Storage is {'real' if opened.gds.real else 'emulated'} here")
        yield opened


@pytest.mark.parametrize("nbytes", [4096, PIECE_NBYTES, PIECE_NBYTES + 3 * PAGE])
def test_the_devices_sum_is_the_specification(nbytes: int) -> None:
    data = noise(nbytes, 0)
    assert device_checksum(data.cuda()) == checksum(memoryview(data.numpy()), 0)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(("writer", "reader"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_what_one_side_wrote_the_other_reads(folder: DiskFolder, nbytes: int, writer: str, reader: str) -> None:
    file = folder.file("a", [100, 9 * MIB + 5, 100])
    file.write(1, noise(9 * MIB + 5, 1))  # so that there is something behind the end
    data = noise(nbytes, 0)
    target = on_a_page(nbytes) if reader == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    file.write(1, data.to(writer))
    file.read(1, target)
    assert torch.equal(target.cpu(), data)


def test_a_write_waits_for_what_makes_its_data(folder: DiskFolder) -> None:
    file = folder.file("a", [64 * MIB])
    data, read = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), torch.empty(64 * MIB, dtype=torch.uint8)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        data.fill_(7)
        file.write(0, data)
    file.read(0, read)
    assert (read == 7).all()


def test_a_byte_that_somebody_changes_is_found_on_the_device(folder: DiskFolder) -> None:
    file, data = folder.file("a", [MIB]), noise(MIB, 0).cuda()
    file.write(0, data)
    with file.path.open("r+b") as other:
        other.seek(PAGE + 5000)
        other.write(b"changed")
    with pytest.raises(DiskFault, match="is not what this run wrote: its data was changed"):
        file.read(0, data)
    file.write(0, data)
    with file.path.open("r+b") as other:
        other.truncate(PAGE + 5000)
    with pytest.raises(DiskFault, match="extent 0 of .*/a could not be read"):
        file.read(0, data)


def test_device_and_host_move_at_once(folder: DiskFolder) -> None:
    file = folder.file("a", [8 * MIB] * 4)
    failures: list[BaseException] = []

    def lane(extent: int, device: str) -> None:
        try:
            for turn in range(5):
                data = noise(8 * MIB, 10 * extent + turn).to(device)
                read = torch.empty_like(data)
                file.write(extent, data)
                file.read(extent, read)
                assert torch.equal(read, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=lane, args=(i, ("cuda", "cpu")[i % 2])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_python_goes_on_while_bytes_move(folder: DiskFolder) -> None:
    """Lanes launch work meanwhile; whoever keeps the interpreter for a read would hold them all up."""
    file, data = folder.file("a", [256 * MIB]), torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    longest_s, done = [0.0], threading.Event()

    def beats() -> None:
        before = time.perf_counter()
        while not done.is_set():
            time.sleep(1e-4)
            now = time.perf_counter()
            longest_s[0], before = max(longest_s[0], now - before), now

    thread = threading.Thread(target=beats)
    thread.start()
    began = time.perf_counter()
    file.write(0, data)
    file.read(0, data)
    took_s = time.perf_counter() - began
    done.set()
    thread.join()
    assert longest_s[0] < took_s / 4


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("contents", ["blocks", "all"])
@pytest.mark.usefixtures("deterministic")
def test_a_step_whose_weights_and_saved_inputs_go_straight_is_that_of_a_run_in_memory(
    update: str, contents: str, tmp_path: Path
) -> None:
    """blocks: each block has another combination of contents on disk. all: everything, saved inputs too. Losses, norms
    and every plane after the steps, bit for bit."""
    layout = layout_of()
    disk = [(content, unit) for unit, chosen in zip(layout.blocks, EVERY, strict=False) for content in chosen]
    if contents == "all":
        disk = [(content, unit) for unit in range(len(layout.units)) for content in EVERY[-1]]
    program = {"update": update, "max_grad_norm": 0.0 if update == "eager" else 0.5}
    where = {
        "disk": tuple(disk),
        "saved_on_disk": 99 if contents == "all" else 3,
        "offload_dir": str(tmp_path / "disk"),
    }
    with CudaDevice() as device:
        losses, planes = outcome(device, **program)
        found, other = outcome(device, **program, **where, gds=True)
        assert found == losses
        assert all(map(torch.equal, planes, other))
        assert losses[0][0] - losses[-1][0] >= 0.5
