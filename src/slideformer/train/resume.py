"""Where a run starts: at the beginning with the model's weights, or at a checkpoint that belongs to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import JsonValue

from slideformer.config import TrainConfig
from slideformer.data import Batches
from slideformer.engine import Decided, Engine
from slideformer.errors import BadInput
from slideformer.model import weights
from slideformer.model.decoder import Decoder
from slideformer.model.folder import CONFIG
from slideformer.train import checkpoint, fingerprint
from slideformer.train.checkpoint import Checkpoint, Damaged, Progress
from slideformer.train.console import Console
from slideformer.train.disk_use import written_before
from slideformer.train.retention import numbered, require_space, require_space_for_result
from slideformer.train.saver import Saver
from slideformer.train.schedule import num_steps
from slideformer.train.setup import save_dtype


@dataclass(frozen=True, slots=True)
class Origin:
    """found: checkpoints to start from, best first; empty: the beginning. maths, bits: see `fingerprint`, before there
    is an engine. decided: what the engine of the first of them had decided, for this run's. disk_writes: bytes that
    earlier starts have written to the disk tier. require_space: raises DoesNotFit where the disk has no room for the
    checkpoints to come."""

    found: list[Checkpoint]
    maths: dict[str, JsonValue]
    bits: dict[str, JsonValue]
    decided: Decided | None = None
    disk_writes: int = 0
    require_space: Callable[[], None] = lambda: None

    def load(self, engine: Engine, source: Path, console: Console) -> Progress:
        """Set the engine's state. source: the model's folder, read at the beginning only."""
        if not self.found:
            weights.load(source, engine.layout, engine.write, names=engine.decoder.names)
            return self.beginning
        loaded = _load_first(self.found, engine, console)
        if differ := fingerprint.bit_differences(loaded.record.bits, fingerprint.bits_on(engine, self.bits)):
            why = "" if engine.as_earlier else f"what {loaded.folder.name} was made with has no room here, so "
            console.warn(f"{why}the last bits may differ from an unbroken run's: {fingerprint.listed(differ)}")
        return loaded.record.progress.model_copy(update={"disk_writes": self.disk_writes})

    @property
    def first_step(self) -> int:
        """How many steps have been made."""
        return self.found[0].record.progress.step if self.found else 0

    @property
    def beginning(self) -> Progress:
        """Where a run without a checkpoint starts."""
        return Progress(step=0, num_updates=0, evaluated=False, disk_writes=self.disk_writes)

    @contextmanager
    def saver(self, config: TrainConfig, engine: Engine, console: Console) -> Iterator[Saver | None]:
        if config.save_strategy == "no":
            yield None
            return
        self.require_space()  # again, now that the engine has taken what it puts on disk
        bits = fingerprint.bits_on(engine, self.bits)
        with Saver(config, engine, console, self.maths, bits).running() as saver:
            yield saver


def earlier(config: TrainConfig, console: Console) -> list[Checkpoint]:
    """Checkpoints to start from, best first; empty: from the beginning. Needs no data, writes nothing.

    Raises BadInput: no complete one where one was asked for, or an output_dir that has some while none was asked for.
    """
    asked, parent = config.resume_from_checkpoint, Path(config.output_dir)
    if isinstance(asked, str) and asked != "auto":
        try:
            return [checkpoint.open_checkpoint(Path(asked))]
        except Damaged as error:
            raise BadInput(f"resume_from_checkpoint: {asked} is no complete checkpoint: {error}") from None
    found = _complete(parent, console if asked else None)
    if not asked and found:
        raise BadInput(
            f"{parent} has checkpoints of an earlier run, the newest {found[0].folder.name}: go on from it with "
            "resume_from_checkpoint: auto, remove them, or choose another output_dir"
        )
    if asked is True and not found:
        raise BadInput(
            f"resume_from_checkpoint is true, but {parent} has no complete checkpoint: give the folder of one, or "
            "auto to start anew where there is none"
        )
    if not found and (parent / CONFIG).exists():
        console.warn(f"{parent} has the result of an earlier run, which this run's will replace")
    return found


def find_origin(
    config: TrainConfig, found: list[Checkpoint], batches: Batches, decoder: Decoder, device_kind: str
) -> Origin:
    """Where to start, given what `earlier` found: it belongs to this run, and there is room for checkpoints to come.

    Raises BadInput for the newest that is another config's, and where max_disk_writes is spent, and DoesNotFit.
    """
    disk_writes = written_before(config, max((one.record.progress.disk_writes for one in found), default=None))
    model_nbytes = decoder.layout.numel * save_dtype(config, decoder).itemsize
    if config.save_strategy == "no":
        require_space_for_result(config, model_nbytes)
    if config.save_strategy == "no" and not found:
        return Origin([], {}, {}, disk_writes=disk_writes)
    steps = num_steps(config, batches)
    maths, bits = fingerprint.maths(config, batches, decoder, steps), fingerprint.bits(config, decoder, device_kind)
    origin = Origin([], maths, bits, disk_writes=disk_writes)
    if found and (differ := fingerprint.differences(found[0].record.maths, origin.maths)):
        raise BadInput(
            f"{found[0].folder} cannot be continued with this config: {fingerprint.listed(differ)}; change it back, or "
            "start anew in another output_dir"
        )
    found = [one for one in found if not fingerprint.differences(one.record.maths, origin.maths)]
    first = found[0].record.progress.step if found else 0
    if first > steps:
        raise BadInput(f"{found[0].folder} has {first} steps, and the run has {steps}: raise max_steps")
    before = fingerprint.decided(found[0].record.bits, bits, decoder.layout.tile_numel) if found else None
    origin = replace(origin, found=found, decided=before)
    if config.save_strategy != "no":
        every = config.save_steps or batches.steps_per_epoch
        space = partial(
            require_space,
            config,
            decoder.layout,
            keep_residual=decoder.dtype is torch.float32,
            model_nbytes=model_nbytes,
            num_saves=steps // every - first // every + 1,
        )
        space()
        origin = replace(origin, require_space=space)
    return origin


def _complete(parent: Path, console: Console | None) -> list[Checkpoint]:
    """Newest first. Incomplete ones are told about unless there is no console."""
    found = []
    for _, path in numbered(parent):
        try:
            found.append(checkpoint.open_checkpoint(path))
        except Damaged as error:
            if console is not None:
                console.warn(f"{path} is passed over: {error}")
    return found


def _load_first(found: list[Checkpoint], engine: Engine, console: Console) -> Checkpoint:
    """Load the best one that is not damaged after all. Raises BadInput if all are."""
    for one in found:
        try:
            start = time.perf_counter()
            one.load(engine)
        except Damaged as error:
            console.warn(f"{one.folder} is passed over: {error}")
        else:
            nbytes = sum(one_file.nbytes for one_file in one.sums.values())
            console.note(f"going on from {one.folder}, {checkpoint.told(nbytes, time.perf_counter() - start)}")
            return one
    raise BadInput(f"{found[0].folder} is damaged, and there is no other checkpoint to go on from: start anew")
