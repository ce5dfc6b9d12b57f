"""Fixtures of the data tests: the byte-level tokenizer, files of rows, configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data import byte_tokenizer
from slideformer.config import TrainConfig
from slideformer.data.tokenizer import Codec


@pytest.fixture
def make_codec() -> Callable[..., Codec]:
    return byte_tokenizer.make_codec


@pytest.fixture
def codec(make_codec: Callable[..., Codec]) -> Codec:
    return make_codec()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects as JSON lines (text as it is) into a file of its own and returns its path."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_config() -> Callable[..., TrainConfig]:
    def make(dataset: object = "unused.jsonl", **fields: object) -> TrainConfig:
        return TrainConfig.model_validate({"model_name_or_path": "toy", "dataset": dataset, **fields})

    return make
