"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slideformer.config import TrainConfig
from train.toy import make_config, make_model, write_sums


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """Toy tensors are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config_for(model_folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config on the toy model with 24 rows of sums; the result goes to tmp_path / "out"."""

    def make(*, model: Path = model_folder, **fields: object) -> TrainConfig:
        rows = tmp_path / "rows.jsonl"
        if not rows.exists():
            write_sums(rows, 24)
        return make_config(model, rows, tmp_path / "out", **fields)

    return make
