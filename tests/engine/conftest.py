"""Toy tensors are too small to share between threads: with two, a step of the reference takes ten times as long."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
