"""What holds for every test of the engine."""

import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """Toy tensors are too small to share between threads: with two, a step of the reference takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    before = set(threading.enumerate())  # other tests of this process may have left a disk that hangs to its thread
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("slideformer") and t not in before]
    assert left == [], "threads that nobody joined"
