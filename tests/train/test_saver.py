"""A checkpoint that is written while training goes on is that of its step, and training is that without it."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest

from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    engine_on,
    on_disk,
    state_hashes,
    tiny_batch,
    tiny_decoder,
    toy_options,
    write_weights,
)
from slideformer.engine import fit
from slideformer.engine.options import CONTENTS
from slideformer.errors import RunFailed
from slideformer.memory import Limit
from slideformer.model import files
from slideformer.train import checkpoint, trainer
from slideformer.train.checkpoint import Progress, Record
from slideformer.train.console import PlainConsole
from slideformer.train.saver import Saver
from slideformer.train.snapshot import Snapshot, spare_nbytes
from slideformer.train.trainer import train
from train.toy import make_config

OPTIONS = {
    "eager": EAGER,
    "clipped": DEFERRED,
    "ahead": {**DEFERRED, "max_grad_norm": 100.0, "ahead": (0, 1, 2)},
    "ahead and clipped": {**DEFERRED, "ahead": (1, 2)},
    "resident": {**DEFERRED, "resident": (2, 3)},
    "moments on disk": {**EAGER, "disk": ("exp_avg", "exp_avg_sq")},
    "all on disk, clipped": {**DEFERRED, "disk": CONTENTS},
}


def slow(monkeypatch, seconds: float) -> None:
    """A disk on which every piece takes so long."""

    class Slow(files.Summing):
        def write(self, data):
            time.sleep(seconds)
            super().write(data)

    monkeypatch.setattr(files, "Summing", Slow)


def slow_copies(monkeypatch) -> list[int]:
    """Copies to memory take a while too. Returns the units that are copied so."""
    taken: list[int] = []
    take = Snapshot.take

    def slowly(snapshot, state):
        time.sleep(0.01)
        take(snapshot, state)
        taken.append(snapshot._unit)

    monkeypatch.setattr(Snapshot, "take", slowly)
    return taken


def unit_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("tied", "memory"), [(True, "what is spare"), (False, "none"), (False, "for two units"), (False, "what is spare")]
)
def test_units_are_copied_after_their_update_and_before_the_next(tmp_path, monkeypatch, options, tied, memory) -> None:
    def two_steps(engine) -> None:
        write_weights(engine.layout, engine)
        for seed in range(2):
            engine.step(tiny_batch(seed=seed), lr=LR).wait()

    def three_more(engine) -> dict[str, str]:
        results = [engine.step(tiny_batch(seed=seed), lr=LR) for seed in range(2, 5)]
        results[-1].wait()
        return state_hashes(engine)

    def decoder():
        return tiny_decoder(tied=tied)

    if contents := options.get("disk"):
        options = {**options, "disk": on_disk(decoder(), contents), "offload_dir": str(tmp_path / "disk")}
    done = Progress(step=2, num_updates=2, evaluated=True)
    with engine_on(decoder(), toy_options(**options)) as engine:
        two_steps(engine)
        record = Record(progress=done, maths={}, bits={}, config={}, versions={})
        expected = unit_files(checkpoint.write(tmp_path, record, engine))
        undisturbed = three_more(engine)
    out = tmp_path / "out"
    out.mkdir()
    with engine_on(decoder(), toy_options(**options)) as engine:
        two = sum(sorted(Snapshot.nbytes_of(unit, engine.state) for unit in range(len(engine.layout.units)))[-2:])
        nbytes = {"none": 0, "for two units": two, "what is spare": None}[memory]
        config = make_config(tmp_path, tmp_path, out).model_copy(update={"save_memory": nbytes})
        two_steps(engine)
        slow(monkeypatch, 0.002)
        taken = slow_copies(monkeypatch)
        with Saver(config, engine, PlainConsole(io.StringIO()), {}, {}).running() as saver:
            saver.save(done)
            assert not saver.is_done
            assert three_more(engine) == undisturbed
        assert unit_files(out / "checkpoint-2") == expected
        assert engine.held_s > 0
        num_units = 0 if options.get("disk") else len(engine.layout.units)
        few, most = {"none": (0, 0), "for two units": (2, num_units - 1), "what is spare": (num_units, num_units)}[
            memory
        ]
        assert min(few, num_units) <= len(taken) <= most or not num_units and not taken


@pytest.fixture
def _no_parity_check(monkeypatch) -> None:
    """Most of the time of a run this short; tests/model has it."""
    monkeypatch.setattr(trainer, "check_parity", lambda *args, **settings: None)


def waited(told: str) -> list[tuple[float, float]]:
    """(seconds that writing took, seconds that training waited) of each checkpoint."""
    return [
        (float(a), float(b)) for a, b in re.findall(r"in ([\d.]+) s \(.*for which training waited ([\d.]+) s", told)
    ]


def run(config) -> str:
    told = io.StringIO()
    train(config, PlainConsole(told))
    return told.getvalue()


@pytest.mark.usefixtures("_no_parity_check")
def test_training_waits_for_the_copy_and_not_for_the_disk(config_for, tmp_path, monkeypatch) -> None:
    flush = files.flush
    monkeypatch.setattr(files, "flush", lambda path: (time.sleep(0.1), flush(path)))
    behind = waited(run(config_for(max_steps=250, save_steps=100)))  # the last is at the end, which waits for it
    other = str(tmp_path / "other")
    before = waited(run(config_for(output_dir=other, save_in_background=False, max_steps=2, save_steps=1)))
    assert [seconds > 0.8 for seconds, _ in behind + before] == [True] * 5
    assert behind[0][1] <= 0.1 * behind[0][0]
    assert all(wait >= 0.9 * seconds for seconds, wait in before)


@pytest.mark.usefixtures("_no_parity_check")
def test_a_disk_that_refuses_ends_the_run_soon_after_and_keeps_the_checkpoint_before(config_for, tmp_path, monkeypatch):
    flush = files.flush

    def refusing(path: Path) -> None:
        if "checkpoint-20" in str(path):
            raise OSError(28, "No space left on device")
        flush(path)

    monkeypatch.setattr(files, "flush", refusing)
    with pytest.raises(
        RunFailed, match="checkpoint-20 could not be written: No space left on device; the checkpoints "
    ):
        run(config_for(max_steps=10**6, save_steps=10))
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-10"]


@pytest.mark.usefixtures("_no_parity_check")
def test_a_step_that_fails_does_not_take_the_checkpoint_before_it_along(config_for, tmp_path, monkeypatch) -> None:
    slow(monkeypatch, 0.02)
    fields = {"learning_rate": 1e38, "warmup_steps": 0, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    with pytest.raises(RunFailed, match="step 2: "):
        run(config_for(max_steps=5, save_steps=1, **fields))
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-1"]
    assert checkpoint.is_complete(tmp_path / "out/checkpoint-1")


@pytest.mark.parametrize(("limit", "available", "spare"), [(100, 1000, 30), (1000, 50, 25), (30, 1000, 0)])
def test_half_of_what_nobody_uses_is_spare(monkeypatch, limit, available, spare) -> None:
    monkeypatch.setattr(fit, "host_limit", lambda: Limit(limit, "this container"))
    monkeypatch.setattr(fit, "resident_nbytes", lambda: 40)
    monkeypatch.setattr(fit, "available_nbytes", lambda: available)
    assert spare_nbytes() == spare


@pytest.mark.usefixtures("_no_parity_check")
def test_where_no_memory_is_spare_updates_wait_for_the_files(config_for, monkeypatch) -> None:
    monkeypatch.setattr(fit, "available_nbytes", lambda: 4096)
    told = run(config_for(max_steps=2, save_steps=1))
    assert "updates wait until their units are in its files: no memory is spare" in told and len(waited(told)) == 2


def test_copies_are_within_the_limit_of_the_host_with_all_that_lies_there(tmp_path) -> None:
    """On a CPU the device's buffers too."""
    with engine_on(tiny_decoder(), toy_options(**EAGER)) as engine:
        one_tier = engine.budget.on_one_tier().host_nbytes
        sizes = [Snapshot.nbytes_of(unit, engine.state) for unit in engine.update_order()]
        for num, room in ((0, 0), (1, min(sizes)), (len(sizes) - 1, sum(sizes) - 1), (len(sizes), sum(sizes))):
            config = make_config(tmp_path / "model", tmp_path, tmp_path)
            config = config.model_copy(update={"max_host_memory": one_tier + room})
            told = io.StringIO()
            with Saver(config, engine, PlainConsole(told), {}, {}).running():
                pass
            found = re.search(rf"copies of (\d) of {len(sizes)} units", told.getvalue())
            assert (int(found[1]) if found else 0) == num


def test_a_save_does_not_wait_until_all_memory_for_copies_is_there(tmp_path, monkeypatch) -> None:
    def populate(_, wanted):
        until = time.monotonic() + 20
        while wanted() and time.monotonic() < until:
            time.sleep(0.01)

    monkeypatch.setattr(Snapshot, "populate", populate)
    with engine_on(tiny_decoder(), toy_options(**EAGER)) as engine:
        write_weights(engine.layout, engine)
        engine.step(tiny_batch(seed=0), lr=LR).wait()
        start = time.monotonic()
        config = make_config(tmp_path / "model", tmp_path, tmp_path)
        with Saver(config, engine, PlainConsole(io.StringIO()), {}, {}).running() as saver:
            saver.save(Progress(step=1, num_updates=1, evaluated=True))
            saver.wait()
        assert time.monotonic() - start < 10
    assert (tmp_path / "checkpoint-1").is_dir()
