"""What a rename makes visible is on disk by then: a machine that loses its power never shows a half as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.toys import EAGER, engine_on, tiny_decoder, toy_options, write_weights
from slideformer.model.folder import save_model
from slideformer.train import checkpoint
from slideformer.train.checkpoint import Progress, Record


@pytest.fixture
def order(monkeypatch) -> list[tuple[str, Path]]:
    """("flush", path) of everything that is flushed, ("rename", where to) of what gets its name, in their order."""
    seen: list[tuple[str, Path]] = []
    fsync = os.fsync

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def noted(move: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def moved(source: Path, target: Path) -> None:
            seen.append(("rename", Path(target)))
            move(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", flushed)
    for name in ("rename", "replace"):  # pathlib's end in these
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    return seen


def test_a_checkpoint_has_its_name_when_all_of_it_is_on_disk_and_then_the_name_is(tmp_path, order) -> None:
    with engine_on(tiny_decoder(), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        progress = Progress(step=1, num_updates=1, evaluated=True)
        done = checkpoint.write(tmp_path, Record(progress=progress, maths={}, bits={}, config={}, versions={}), engine)
    partial = tmp_path / ".checkpoint-1.partial"
    named = order.index(("rename", done))
    before = [path for what, path in order[:named] if what == "flush"]
    assert {partial / path.name for path in done.iterdir()} <= set(before)
    assert before.index(partial / "manifest.json") == len(before) - 2, "the marker comes last"
    assert before[-1] == partial, "with the names of the files"
    assert ("flush", tmp_path) in order[named:]


def test_a_model_has_its_name_when_all_of_it_is_on_disk(tmp_path, order) -> None:
    target = tmp_path / "model"
    with engine_on(tiny_decoder(), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        save_model(target, engine.decoder, engine.read, dtype=engine.decoder.dtype, max_shard_nbytes=20_000)
    renamed = {path: index for index, (what, path) in enumerate(order) if what == "rename"}
    weights = [path for path in target.iterdir() if path.suffix == ".safetensors"]
    assert len(weights) > 1
    for path in weights:
        flushed = [where.name for what, where in order[: renamed[path]] if what == "flush"]
        assert path.name in flushed, path.name
