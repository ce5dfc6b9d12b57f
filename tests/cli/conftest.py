"""Runs the command line on a toy model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slideformer.cli import main
from train.toy import make_model, write_sums


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and rows.jsonl. Not to be written to."""
    folder = tmp_path_factory.mktemp("toy")
    make_model(folder / "model")
    write_sums(folder / "rows.jsonl", 12)
    return folder


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def slideformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """`slideformer WORDS` in tmp_path, 80 columns wide. In this process: torch takes seconds to import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> Done:
        monkeypatch.setattr("sys.argv", ["slideformer", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(ended.value.code or 0, out, err)

    return run


@pytest.fixture
def yaml_for(tmp_path: Path, toy: Path) -> Callable[..., Path]:
    """A config file on the toy model; keywords are written as they are."""

    def write(**fields: object) -> Path:
        path = tmp_path / "train.yaml"
        settings = {
            "model_name_or_path": toy / "model",
            "dataset": toy / "rows.jsonl",
            "output_dir": "out",
            "device": "cpu",
            "cpu_threads": 1,
            "max_length": 48,
            "max_steps": 2,
            "tile_numel": 4096,
            **fields,
        }
        path.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
        return path

    return write
