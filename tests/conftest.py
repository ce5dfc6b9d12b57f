"""What holds for every test: few torch threads. Timeouts and thread exceptions are set in pyproject.toml."""

import signal

import pytest
import torch

torch.set_num_threads(2)

# A shell that starts the tests in the background has them ignore SIGINT, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# tests/gpu needs a GPU; `make gpu` runs it there. The logic behind it runs here on the CPU device.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
