"""One checkpoint: a folder from which a run goes on as if it had never stopped.

One safetensors file a unit (both planes of the masters, the moments), trainer.json (how far the run is, and what must
not change), and manifest.json (sizes and checksums of the others), which is written last: without it nothing counts.
The state is written from where it lies and read a tile at a time, so neither takes memory that grows with the model.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from slideformer.engine import Engine
from slideformer.errors import BadInput, RunFailed
from slideformer.layout import Layout, Param
from slideformer.memory import size
from slideformer.memory.state import PlaneName, State
from slideformer.model import files, tensorfile
from slideformer.train.redact import redacted
from slideformer.train.snapshot import PLANES, Snapshot

FORMAT: Literal[1] = 1
TRAINER, MANIFEST = "trainer.json", "manifest.json"


class Damaged(Exception):  # noqa: N818 whoever looks for a checkpoint takes another
    """The folder is no complete checkpoint. The message says what is wrong, as the end of a sentence."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Model = TypeVar("_Model", bound=_Frozen)


class LoggedSums(_Frozen):
    """What the next line of metrics already counts, when a checkpoint falls between two lines."""

    loss_sum: float = 0.0
    num_target_tokens: int = 0
    num_input_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0


class Progress(_Frozen):
    """How far a run is. step: steps done; the batches and the learning rate of the next follow from it alone."""

    step: int
    num_updates: int  # steps applied: without those skipped because they were not finite
    evaluated: bool  # the evaluation that is due after this step, if one is, has been made
    num_input_tokens_seen: int = 0
    num_target_tokens_seen: int = 0
    nonfinite_steps: int = 0
    logged: LoggedSums = LoggedSums()
    judged: tuple[tuple[int, float], ...] = ()  # step and metric_for_best_model of each evaluation
    best_saved: int | None = None  # the step of the best of them that has a checkpoint
    callbacks: dict[str, JsonValue] = {}  # what callbacks want to find again
    disk_writes: int = 0  # bytes, to the disk tier


class Record(_Frozen):
    """trainer.json. maths: what must be the same to go on; bits: what may differ, at the price of the last bits."""

    format: Literal[1] = FORMAT
    progress: Progress
    maths: dict[str, JsonValue]
    bits: dict[str, JsonValue]
    config: dict[str, JsonValue]
    versions: dict[str, str]


class _Sum(_Frozen):
    nbytes: int
    crc32: int


class _Manifest(_Frozen):
    format: Literal[1] = FORMAT
    step: int
    files: dict[str, _Sum]


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


# writing


def write(parent: Path, record: Record, engine: Engine) -> Path:
    """Write `parent`/checkpoint-STEP; under that name there is never anything but a complete one. Blocks.

    A complete checkpoint of that step is replaced; anything else of its name is set aside. Raises RunFailed when the
    state is torn or the disk refuses; what was written of the new one is then removed.
    """
    draft = Draft(parent, record, engine.layout)
    with draft.guarded():
        for index in range(len(engine.layout.units)):
            draft.unit(index, engine.settled_state())
    return draft.finish()


class Draft:
    """A checkpoint that is being written, under another name until it is complete. Units in any order, each once."""

    def __init__(self, parent: Path, record: Record, layout: Layout) -> None:
        """Raises RunFailed, as all of this does, when the disk refuses."""
        self._record, self._layout = record, layout
        name = folder_name(record.progress.step)
        self._partial, self._final = parent / f".{name}.partial", parent / name
        self._sums: dict[str, files.Sum] = {}
        self.discard()
        with self.guarded():
            self._partial.mkdir()

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._sums.values())

    def unit(self, index: int, state: State | Snapshot) -> None:
        """Write a unit's file and sum it up. It may be on its way to the disk still when this returns."""
        with self.guarded():
            writer = _writer(_tensors(self._layout, index, state), self._layout)
            self._sums[unit_file(index)] = files.write_unflushed(self._partial / unit_file(index), writer)

    def finish(self) -> Path:
        """Flush all of it, add the marker, and put it in its place."""
        with self.guarded():
            for name in self._sums:
                files.flush(self._partial / name)
            text = json.dumps(redacted(self._record.model_dump(mode="json")), indent=2)
            self._sums[TRAINER] = files.write_text(self._partial / TRAINER, text)
            listed = {name: _Sum(nbytes=one.nbytes, crc32=one.crc32) for name, one in sorted(self._sums.items())}
            manifest = _Manifest(step=self._record.progress.step, files=listed)
            files.write_text(self._partial / MANIFEST, manifest.model_dump_json(indent=2))
            files.flush(self._partial)
            _into_place(self._partial, self._final)
        return self._final

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever goes wrong inside leaves nothing of the draft."""
        try:
            yield
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise RunFailed(
                    f"{self._final} could not be written: {error.strerror or error}; the checkpoints before it are as "
                    "they were: make room or choose another output_dir, and go on with resume_from_checkpoint"
                ) from error
            raise


def unit_file(index: int) -> str:
    return f"unit-{index:04}.safetensors"


def nbytes_of(layout: Layout, planes_nbytes: int) -> int:
    """Bytes of a checkpoint, a little over. planes_nbytes: of the state, second copies left out."""
    num_params = sum(len(unit.params) for unit in layout.units)
    return planes_nbytes + 4 * 256 * num_params + 2**16


def _tensors(layout: Layout, index: int, state: State | Snapshot) -> list[tensorfile.Writing]:
    return [
        tensorfile.Writing(one.name, one.dtype, one.param.shape, one.param.numel, one.reader(state, index))
        for one in _placed(layout, index, state)
    ]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of a unit's file. offset: in the plane."""

    name: str
    plane: PlaneName
    dtype: torch.dtype
    param: Param
    offset: int

    def reader(self, state: State | Snapshot, unit: int) -> Callable[[int, int], torch.Tensor]:
        return lambda start, stop: state.part(unit, self.plane, self.offset + start, self.offset + stop)


def _placed(layout: Layout, index: int, state: State | Snapshot) -> Iterator[_Placed]:
    """Every tensor of a unit's file. A frozen parameter has no moments, and under bf16 compute no residual."""
    unit = layout.units[index]
    for plane in PLANES:
        numel, dtype = state.extent(index, plane)
        for param in unit.params:
            offset = unit.offsets[param.name]
            if offset + param.numel <= numel:
                yield _Placed(f"{plane}.{param.name}", plane, dtype, param, offset)


def _writer(tensors: list[tensorfile.Writing], layout: Layout) -> Callable[[files.Summing], None]:
    return lambda out: tensorfile.write(out, tensors, piece_numel=layout.tile_numel)


def _into_place(partial: Path, final: Path) -> None:
    old = final.parent / f".{final.name}.old"
    if final.exists():
        if is_complete(final):
            final.rename(old)  # put back by `retention.clean`, should the next line not be reached
        else:
            final.rename(_free_name(final))
    partial.rename(final)
    files.flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _free_name(final: Path) -> Path:
    names = (final.parent / f"{final.name}.incomplete{n or ''}" for n in range(10**6))
    return next(name for name in names if not name.exists())


# reading


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest, sizes and trainer.json are in order. `load` looks at the rest."""

    folder: Path
    record: Record
    sums: dict[str, _Sum]

    def load(self, engine: Engine) -> None:
        """Set the engine's state, a tile at a time. Raises Damaged: the state is then to be loaded from elsewhere."""
        layout = engine.layout
        for index in range(len(layout.units)):
            path = self.folder / unit_file(index)
            try:
                entries = tensorfile.read_header(path)
            except BadInput as error:
                raise Damaged(str(error)) from None
            expected = {one.name: one for one in _placed(layout, index, engine.settled_state())}
            for name in sorted(expected.keys() ^ entries.keys()):
                raise Damaged(f"{path.name} {'lacks' if name in expected else 'also holds'} {name}")
            crc32 = self._load_unit(engine, index, path, entries, expected)
            if crc32 != self.sums[path.name].crc32:
                raise Damaged(f"{path.name} does not have the checksum that {MANIFEST} gives for it")
        engine.restore_num_updates(self.record.progress.num_updates)

    def _load_unit(
        self,
        engine: Engine,
        index: int,
        path: Path,
        entries: dict[str, tensorfile.Entry],
        expected: dict[str, _Placed],
    ) -> int:
        """Read one file from its first byte to its last; returns its checksum."""
        numel = engine.layout.tile_numel
        buffer = torch.empty(min(numel, engine.layout.units[index].numel) * 4, dtype=torch.uint8)
        in_order = sorted(entries.values(), key=lambda entry: entry.start)
        with open(path, "rb") as file:
            crc32 = zlib.crc32(file.read(in_order[0].start))
        for entry in in_order:
            placed = expected[entry.name]
            if tensorfile.DTYPES.get(entry.dtype) is not placed.dtype or entry.shape != placed.param.shape:
                raise Damaged(f"{path.name}: {entry.name} is {entry.dtype} {list(entry.shape)}")
            offset = placed.offset
            for piece in tensorfile.pieces(entry, min(numel, buffer.numel() // 4), buffer):
                crc32 = zlib.crc32(memoryview(piece.view(torch.uint8).numpy()), crc32)
                engine.restore(index, placed.plane, offset, piece)
                offset += piece.numel()
        return crc32


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check that a folder holds a complete checkpoint. Reads little. Raises Damaged."""
    if not folder.is_dir():
        raise Damaged("it is not a folder")
    if not (folder / MANIFEST).is_file():
        raise Damaged(f"it has no {MANIFEST}, so it is not a checkpoint that was finished")
    manifest = _parsed(_Manifest, (folder / MANIFEST).read_bytes(), MANIFEST)
    for name, wanted in manifest.files.items():
        if Path(name).name != name:
            raise Damaged(f"{MANIFEST} names {name!r}, which is not the name of a file in it")
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        found = (folder / name).stat().st_size
        if found != wanted.nbytes:
            raise Damaged(f"{name} has {found} bytes instead of {wanted.nbytes}")
    if TRAINER not in manifest.files:
        raise Damaged(f"{MANIFEST} names no {TRAINER}")
    text = (folder / TRAINER).read_bytes()
    if zlib.crc32(text) != manifest.files[TRAINER].crc32:
        raise Damaged(f"{TRAINER} does not have the checksum that {MANIFEST} gives for it")
    return Checkpoint(folder, _parsed(Record, text, TRAINER), manifest.files)


def is_complete(folder: Path) -> bool:
    try:
        open_checkpoint(folder)
    except Damaged:
        return False
    return True


def _parsed(model: type[_Model], text: bytes, name: str) -> _Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"])[:-1]
        raise Damaged(f"{name} cannot be read: {where + ': ' if where else ''}{first['msg']}") from None


def told(nbytes: int, seconds: float) -> str:
    """1.2 GiB in 3.4 s (0.4 GB/s)"""
    return f"{size(nbytes)} in {seconds:.1f} s ({nbytes / max(seconds, 1e-9) / 1e9:.1f} GB/s)"
