"""A checkpoint keeps every bit; whatever dies, fails or rots, the last complete one is there and is found."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alone import alone
from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    HookedDevice,
    engine_on,
    on_disk,
    state_hashes,
    tiny_batch,
    tiny_decoder,
    toy_options,
    write_weights,
)
from slideformer.data import Batches, load_dataset, load_tokenizer
from slideformer.device import LaneFailure, open_device
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Engine
from slideformer.engine.options import CONTENTS
from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.model import files
from slideformer.train import checkpoint, retention
from slideformer.train.checkpoint import Damaged, Progress, Record, open_checkpoint
from slideformer.train.console import PlainConsole
from slideformer.train.fingerprint import bits, maths
from slideformer.train.resume import Origin, earlier, find_origin
from slideformer.train.schedule import num_steps
from slideformer.train.setup import build_decoder
from train.toy import make_config, write_sums

AHEAD = {**DEFERRED, "max_grad_norm": 100.0, "ahead": (0, 1, 2)}


@contextmanager
def opened(dtype=torch.float32, *, tile: int = 200, frozen: tuple[str, ...] = (), **options) -> Iterator[Engine]:
    """A tiny engine with its weights."""
    decoder = tiny_decoder(dtype=dtype, tile=tile, blocks=2, frozen=frozen)
    with engine_on(decoder, toy_options(**(options or AHEAD)), CpuDevice()) as engine:
        write_weights(engine.layout, engine)
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """After two steps. The tests save it."""
    with opened() as engine:
        for _ in range(2):
            engine.step(tiny_batch(), lr=LR).wait()
        yield engine


def record(step: int, **progress) -> Record:
    done = Progress(step=step, num_updates=step, evaluated=True, **progress)
    return Record(progress=done, maths={"a": 1}, bits={}, config={}, versions={})


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


# every bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [EAGER, AHEAD], ids=["eager", "with second copies"])
@pytest.mark.parametrize("frozen", [(), (r"layers\.1\.mlp",)], ids=["", "frozen"])
def test_what_is_loaded_is_what_was_saved_and_trains_on_the_same(tmp_path, dtype, options, frozen) -> None:
    with opened(dtype, frozen=frozen, **options) as first:
        for seed in range(3):
            first.step(tiny_batch(seed=seed), lr=LR).wait()
        folder = checkpoint.write(tmp_path, record(3), first)
        saved = state_hashes(first)
        first.step(tiny_batch(seed=3), lr=LR).wait()
        expected = state_hashes(first)
    with opened(dtype, frozen=frozen, tile=333, **options) as second:
        second.step(tiny_batch(seed=9), lr=LR).wait()  # so that other copies are current than in the first
        open_checkpoint(folder).load(second)
        assert state_hashes(second) == saved
        assert second.num_updates == 3
        second.step(tiny_batch(seed=3), lr=LR).wait()
        assert state_hashes(second) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contents", [("exp_avg", "exp_avg_sq"), CONTENTS], ids=["moments", "everything"])
@pytest.mark.parametrize("program", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_state_on_disk_is_saved_and_loaded_as_any_and_goes_on_elsewhere(tmp_path, dtype, contents, program) -> None:
    frozen = (r"layers\.1\.mlp",)
    disk = on_disk(tiny_decoder(dtype=dtype, blocks=2, frozen=frozen), contents)
    stored = {"disk": disk, "offload_dir": str(tmp_path / "disk"), **program}
    with (
        opened(dtype, frozen=frozen, **program) as on_host,
        opened(dtype, frozen=frozen, tile=333, **stored) as in_files,
    ):
        folders = []
        for engine, name in ((on_host, "a"), (in_files, "b")):
            (tmp_path / name).mkdir()
            for seed in range(3):
                engine.step(tiny_batch(seed=seed), lr=LR).wait()
            folders.append(checkpoint.write(tmp_path / name, record(3), engine))
        assert in_files.folder.writes.nbytes > 0
        for file in folders[0].glob("*.safetensors"):
            assert file.read_bytes() == (folders[1] / file.name).read_bytes(), file.name
        saved = state_hashes(on_host)
        hashes = []
        for engine, folder in ((on_host, folders[1]), (in_files, folders[0])):  # each goes on from the other's
            engine.step(tiny_batch(seed=9), lr=LR).wait()
            open_checkpoint(folder).load(engine)
            assert state_hashes(engine) == saved
            engine.step(tiny_batch(seed=3), lr=LR).wait()
            hashes.append(state_hashes(engine))
        assert hashes[0] == hashes[1]


def test_files_are_safetensors_by_the_parameters_names(engine, tmp_path) -> None:
    folder = checkpoint.write(tmp_path, record(2), engine)
    tensors = load_file(folder / "unit-0000.safetensors")
    name = "model.embed_tokens.weight"
    assert set(tensors) == {f"{plane}.{name}" for plane in ("weight", "residual", "exp_avg", "exp_avg_sq")}
    joined = (tensors[f"weight.{name}"].view(torch.int16).int() << 16) + tensors[f"residual.{name}"].int()
    assert torch.equal(joined.view(torch.float32).flatten(), engine.read(0, 0, joined.numel()))


def test_a_torn_state_is_not_saved(tmp_path) -> None:
    def after(number: int) -> None:
        if number in written:  # the first write is done, and the others will not be
            raise RuntimeError("a fault")

    written: list[int] = []
    device = HookedDevice(after=after)
    with engine_on(tiny_decoder(blocks=2), toy_options(**EAGER), device) as engine:
        write_weights(engine.layout, engine)
        plan = engine.plan
        written.append(next(i for i, op in enumerate(plan.ops) if op.kind == "update"))
        with pytest.raises(LaneFailure):
            engine.step(tiny_batch(), lr=LR).wait()
        with pytest.raises(RunFailed, match="torn and cannot be saved"):
            checkpoint.write(tmp_path, record(1), engine)
    assert names(tmp_path) == []


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_saving_and_loading_take_no_memory_that_grows_with_the_model(tmp_path) -> None:
    size, saving, loading = alone(memory_of_a_checkpoint, str(tmp_path))
    assert size > 80 * 2**20
    assert max(saving, loading) <= 4 * WATCHED_TILE + 2**20


WATCHED_TILE = 2**18


def memory_of_a_checkpoint(folder: str) -> tuple[int, int, int]:
    """Bytes of a checkpoint, and by how many this process grew while it was written and while it was read."""
    decoder = tiny_decoder(tile=WATCHED_TILE, blocks=2)
    config = decoder.config
    config.hidden_size, config.intermediate_size, config.vocab_size = 256, 4096, 4096
    decoder = type(decoder)(config, dtype=torch.float32, tile_numel=WATCHED_TILE)
    seen = []

    class Watched(files.Summing):
        def write(self, data):
            super().write(data)
            seen.append(resident())

    with engine_on(decoder, toy_options(**EAGER), CpuDevice()) as engine, pytest.MonkeyPatch.context() as patch:
        write_weights(engine.layout, engine)
        patch.setattr(files, "Summing", Watched)
        before = resident()
        written = checkpoint.write(Path(folder), record(1), engine)
        saving = max(seen) - before
        restore = engine.restore
        patch.setattr(engine, "restore", lambda *args: (restore(*args), seen.append(resident())))
        seen.clear()
        before = resident()
        open_checkpoint(written).load(engine)
        return sum(path.stat().st_size for path in written.iterdir()), saving, max(seen) - before


def test_an_evaluation_takes_no_device_memory_that_training_does_not(engine) -> None:
    engine.step(tiny_batch(), lr=LR).wait()
    before = engine.device.peak_nbytes()
    engine.evaluate(tiny_batch())
    assert engine.device.peak_nbytes() == before > 0


# what dies


class Died(BaseException):
    pass


@contextmanager
def dying_after(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process writes so many bytes and is no more: nothing is tidied up, as little as after a kill."""
    left = [nbytes]

    class Dying(io.FileIO):
        def write(self, data) -> int:
            data = memoryview(data).cast("B")
            if len(data) > left[0]:
                super().write(data[: left[0]])
                left[0] = 0
                raise Died
            left[0] -= len(data)
            return super().write(data)

    with monkeypatch.context() as patched:
        patched.setattr(files, "open", lambda path, mode, buffering: Dying(path, mode), raising=False)
        patched.setattr(checkpoint.shutil, "rmtree", lambda *args, **settings: None)
        with pytest.raises(Died):
            yield


def test_whenever_the_writer_dies_the_checkpoint_before_is_taken(engine, tmp_path, monkeypatch) -> None:
    folder = checkpoint.write(tmp_path, record(1), engine)
    total = sum(path.stat().st_size for path in folder.iterdir())
    chance = random.Random(0)
    for nbytes in [0, 1, 7, 8, 9, total - 200, total - 9, *(chance.randrange(total) for _ in range(40))]:
        with dying_after(nbytes, monkeypatch):
            checkpoint.write(tmp_path, record(2), engine)
        assert names(tmp_path) == [".checkpoint-2.partial", "checkpoint-1"], nbytes
        assert [step for step, path in retention.numbered(tmp_path) if checkpoint.is_complete(path)] == [1]
        retention.clean(tmp_path)
        assert names(tmp_path) == ["checkpoint-1"]
    assert checkpoint.is_complete(checkpoint.write(tmp_path, record(2), engine))


def test_a_folder_cut_off_anywhere_is_incomplete_and_says_why(engine, tmp_path) -> None:
    """As a copy that was broken off, or a disk without power, leaves it: files in any order, the marker last."""
    folder = checkpoint.write(tmp_path, record(1), engine)
    files = sorted(folder.iterdir(), key=lambda path: path.name == "manifest.json")
    reasons = set()
    for count, path in enumerate(files):
        for share in (0.0, 0.5, 0.999):
            broken = tmp_path / "broken"
            shutil.rmtree(broken, ignore_errors=True)
            broken.mkdir()
            for whole in files[:count]:
                shutil.copy(whole, broken)
            content = path.read_bytes()
            (broken / path.name).write_bytes(content[: int(len(content) * share)])
            with pytest.raises(Damaged) as caught:
                open_checkpoint(broken)
            reasons.add(str(caught.value).split(":")[0])
    unfinished = "it has no manifest.json, so it is not a checkpoint that was finished"
    assert reasons == {unfinished, "manifest.json cannot be read"}


def test_a_disk_that_refuses_leaves_the_checkpoint_before_and_nothing_else(engine, tmp_path) -> None:
    checkpoint.write(tmp_path, record(1), engine)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # real refusals, in the middle of a file
    try:
        with pytest.raises(RunFailed, match=r"checkpoint-2 could not be written: File too large; the checkpoints bef"):
            checkpoint.write(tmp_path, record(2), engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["checkpoint-1"]
    assert checkpoint.is_complete(tmp_path / "checkpoint-1")


def test_a_full_disk_is_told(engine, tmp_path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)
        with pytest.raises(RunFailed, match="No space left on device; .* make room or choose another output_dir"):
            checkpoint.write(tmp_path, record(2), engine)
    assert names(tmp_path) == []


# what rots


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda f: (f / "unit-0001.safetensors").unlink(), "unit-0001.safetensors is missing"),
        (lambda f: os.truncate(f / "unit-0002.safetensors", 99), "unit-0002.safetensors has 99 bytes instead of "),
        (lambda f: flip(f / "trainer.json", 40), "trainer.json does not have the checksum"),
        (lambda f: flip(f / "unit-0001.safetensors", -5), "unit-0001.safetensors does not have the checksum"),
        (lambda f: flip(f / "unit-0000.safetensors", 0), "unit-0000.safetensors is not a complete safetensors file"),
        (lambda f: rename_in(f), r"names '../trainer.json', which is not the name of a file in it"),
        (
            lambda f: record_as(f, '"format": 1', '"format": 2'),
            "trainer.json cannot be read: format: Input should be 1",
        ),
        (lambda f: record_as(f, '"maths"', '"math"'), "trainer.json cannot be read: maths: Field required"),
        (lambda f: record_as(f, '"step"', '"pace"'), "trainer.json cannot be read: progress.step: Field required"),
    ],
)
def test_what_is_damaged_is_passed_over_with_its_reason(engine, tmp_path, harm, expected) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path, record(step), engine)
    harm(tmp_path / "checkpoint-2")
    config = make_config(tmp_path / "model", tmp_path, tmp_path, resume_from_checkpoint="auto")
    out = io.StringIO()
    found = earlier(config, PlainConsole(out))
    with opened() as second:
        assert Origin(found, {}, {}).load(second, tmp_path, PlainConsole(out)).step == 1
        assert state_hashes(second) == state_hashes(engine)
    assert f"warning: {tmp_path}/checkpoint-2 is passed over: " in out.getvalue()
    assert expected in out.getvalue()


def record_as(folder: Path, old: str, new: str) -> None:
    """As another version would have written it."""
    path, manifest = folder / "trainer.json", folder / "manifest.json"
    before = path.read_text()
    after = before.replace(old, new, 1)
    assert after != before
    path.write_text(after)
    sums = json.loads(manifest.read_text())
    sums["files"]["trainer.json"] = {"nbytes": len(after.encode()), "crc32": zlib.crc32(after.encode())}
    manifest.write_text(json.dumps(sums))


def rename_in(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"trainer.json"', '"../trainer.json"'))


# which stay


@pytest.mark.parametrize(("limit", "expected"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_last_ones_stay(engine, tmp_path, limit, expected) -> None:
    for step in range(1, 6):
        checkpoint.write(tmp_path, record(step), engine)
        retention.rotate(tmp_path, step, limit)
        assert checkpoint.is_complete(tmp_path / f"checkpoint-{step}")
    assert [step for step, _ in reversed(retention.numbered(tmp_path))] == expected


def test_incomplete_ones_do_not_count_and_later_ones_stay(engine, tmp_path) -> None:
    for step in (1, 2, 3, 9):
        checkpoint.write(tmp_path, record(step), engine)
    (tmp_path / "checkpoint-2/manifest.json").unlink()
    retention.rotate(tmp_path, 3, 2)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-9"]
    retention.rotate(tmp_path, 3, 1)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-9"]


def test_a_complete_one_is_replaced_and_anything_else_is_set_aside(engine, tmp_path) -> None:
    checkpoint.write(tmp_path, record(1), engine)
    checkpoint.write(tmp_path, record(1, nonfinite_steps=7), engine)
    assert open_checkpoint(tmp_path / "checkpoint-1").record.progress.nonfinite_steps == 7
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/of_another_tool").write_text("")
    checkpoint.write(tmp_path, record(2), engine)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-2.incomplete"]
    assert names(tmp_path / "checkpoint-2.incomplete") == ["of_another_tool"]


def test_leftovers_are_removed_and_what_was_being_replaced_is_put_back(engine, tmp_path) -> None:
    folder = checkpoint.write(tmp_path, record(1), engine)
    folder.rename(tmp_path / ".checkpoint-1.old")  # killed between the two renames
    for name in (".checkpoint-2.partial", ".checkpoint-3.removed", ".checkpoint-4.old", "checkpoint-4", "mine"):
        (tmp_path / name).mkdir()
    retention.clean(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4", "mine"]
    assert checkpoint.is_complete(folder)


# where a run starts


@pytest.fixture(scope="module")
def origin_of(model_folder, tmp_path_factory):
    """find_origin of a config, with what was told."""
    rows = write_sums(tmp_path_factory.mktemp("rows") / "rows.jsonl", 24)

    def find(output: Path, **fields) -> Origin:
        config = make_config(model_folder, rows, output, max_steps=10, **fields)
        codec = load_tokenizer(model_folder)
        batches = Batches(load_dataset(config, codec).train, 4, 1, 42, codec.pad_id)
        with open_device("cpu") as device:
            decoder = build_decoder(config, "cpu", device.torch_device)
            find.record = Record(
                progress=Progress(step=2, num_updates=2, evaluated=True),
                maths=maths(config, batches, decoder, num_steps(config, batches)),
                bits=bits(config, decoder, "cpu"),
                config={},
                versions={},
            )
            return find_origin(config, earlier(config, PlainConsole(io.StringIO())), batches, decoder, "cpu")

    return find


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_a_new_ones(engine, origin_of, tmp_path) -> None:
    origin_of(tmp_path)
    checkpoint.write(tmp_path, origin_of.record, engine)
    for own in ({"save_steps": 2}, {}):  # also a run without any: who goes on later would go on from these
        with pytest.raises(BadInput, match="has checkpoints of an earlier run, the newest checkpoint-2: go on from it"):
            origin_of(tmp_path, **own)
    for asked in ("auto", True, str(tmp_path / "checkpoint-2")):
        (found,) = origin_of(tmp_path, save_steps=2, resume_from_checkpoint=asked).found
        assert found.folder == tmp_path / "checkpoint-2"


def test_auto_starts_anew_where_there_is_none_and_true_does_not(origin_of, tmp_path) -> None:
    assert origin_of(tmp_path, resume_from_checkpoint="auto").found == []
    with pytest.raises(BadInput, match="resume_from_checkpoint is true, but .* has no complete checkpoint"):
        origin_of(tmp_path, resume_from_checkpoint=True)
    with pytest.raises(BadInput, match="nowhere is no complete checkpoint: it is not a folder"):
        origin_of(tmp_path, resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_too_little_space_is_told_with_need_free_and_path(engine, origin_of, tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    state = 137_000 * 12  # of the toy model, 136,512 parameters or so
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda path: usage._replace(free=4 * state))
    origin_of(tmp_path, save_steps=2, save_total_limit=1)  # two at a time, and the result
    with pytest.raises(DoesNotFit) as caught:
        origin_of(tmp_path, save_steps=2, save_total_limit=4)
    expected = (
        rf"the checkpoints need .* MiB in {tmp_path} \(5 of .* MiB at a time, and the result of .*\), and 6.3 MiB"
    )
    assert caught.match(expected)
