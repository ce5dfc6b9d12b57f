"""What is really asked of the kernel: the size of every anonymous mapping that an arena makes."""

import mmap

import pytest


@pytest.fixture
def mapped(monkeypatch) -> list[int]:
    sizes: list[int] = []
    real = mmap.mmap

    def record(file: int, nbytes: int) -> mmap.mmap:
        sizes.append(nbytes)
        return real(file, nbytes)

    monkeypatch.setattr("slideformer.memory.host.mmap.mmap", record)
    return sizes
