"""What holds for every test: few torch threads. Timeouts and thread exceptions are set in pyproject.toml."""

import signal
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(2)

# A shell that starts the tests in the background has them ignore SIGINT, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Encoded datasets and what trackio keeps go to folders of the tests, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # read when trackio is imported
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# tests/gpu needs a GPU; `make gpu` runs it there. The logic behind it runs here on the CPU device.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
