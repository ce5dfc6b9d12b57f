"""The store on disk gives back what was written, from any memory, from several threads, and leaves nothing behind."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from slideformer.memory import DiskFault, DiskFolder, padded

BLOCK = 4 * 4096


def on_a_page(nbytes: int, *, off: int = 0) -> torch.Tensor:
    """Bytes that start `off` after the start of a page."""
    return torch.frombuffer(mmap.mmap(-1, nbytes + off + 1), dtype=torch.uint8)[off : off + nbytes]


def noise(nbytes: int, seed: int, *, off: int = 0) -> torch.Tensor:
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return on_a_page(nbytes, off=off).copy_(made)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4096 + 7])
@pytest.mark.parametrize("off", [0, 64])
def test_what_was_written_is_read(tmp_path: Path, nbytes: int, off: int) -> None:
    with DiskFolder(tmp_path / "d", threads=3, block_nbytes=BLOCK) as folder:
        file = folder.file("a", [10, nbytes, 20])
        assert file.nbytes == folder.nbytes == (tmp_path / "d" / "a").stat().st_size == 5 * 4096 + padded(nbytes)
        for write in range(2):
            source, target = noise(nbytes, write, off=off), on_a_page(nbytes, off=64 - off)
            file.write(1, source)
            file.read(1, target)
            assert torch.equal(target, source)
        assert folder.writes.nbytes == folder.reads.nbytes == 2 * nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_every_dtype_moves_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = noise(9000 * dtype.itemsize, 0).view(dtype)  # NaN among them
    with DiskFolder(tmp_path / "d") as folder:
        file = folder.file("a", [values.nbytes])
        file.write(0, values)
        read = torch.empty_like(values)
        file.read(0, read)
    assert torch.equal(read.view(torch.uint8), values.view(torch.uint8))


def test_a_read_touches_nothing_behind_its_target(tmp_path: Path) -> None:
    with DiskFolder(tmp_path / "d") as folder:
        file = folder.file("a", [5000])
        file.write(0, noise(5000, 0))
        whole = on_a_page(3 * 4096).fill_(7)
        file.read(0, whole[:5000])
    assert (whole[5000:] == 7).all()


def test_lanes_read_and_write_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with DiskFolder(tmp_path / "d", threads=4, block_nbytes=BLOCK) as folder:
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


def test_an_extent_that_was_never_written_cannot_be_read(tmp_path: Path) -> None:
    with DiskFolder(tmp_path / "d") as folder:
        file = folder.file("a", [100, 100])
        file.write(0, noise(100, 0))
        with pytest.raises(DiskFault, match=r"extent 1 of .*/d/a was never written and cannot be read"):
            file.read(1, on_a_page(100))


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    with DiskFolder(tmp_path / "d") as folder:
        folder.file("a", [100])
    assert list(tmp_path.iterdir()) == []
    folder.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("disk-")]
