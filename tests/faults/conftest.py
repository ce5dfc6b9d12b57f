"""One process that forks the runs of all fault tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.forks import Server, make_toy, write_config


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    source = Path(__file__).with_name("shim.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def server(shim: Path) -> Iterator[Server]:
    with Server(preload=shim) as started:
        yield started


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model folder, file of rows). Not to be written to."""
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def config(tmp_path: Path, toy: tuple[Path, Path]) -> Callable[..., Path]:
    """Writes tmp_path / train.yaml (or in the folder `at`) and gives back the folder."""

    def make(at: str = ".", **settings: object) -> Path:
        return write_config(tmp_path / at, *toy, **settings).parent

    return make
