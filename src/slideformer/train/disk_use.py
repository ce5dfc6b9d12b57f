"""What a run moves between disk and host: its metrics, and the limit that max_disk_writes sets, over all its starts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from slideformer.config import TrainConfig
from slideformer.engine import Engine
from slideformer.errors import BadInput
from slideformer.layout import Layout
from slideformer.memory import size
from slideformer.memory.disk_look import look_at
from slideformer.memory.state import DTYPES, plane_numel
from slideformer.schedule import StepOptions
from slideformer.train.metrics import METRICS
from slideformer.train.record import DISK_WRITES, FINISHED
from slideformer.train.record import FILE as RUN

STEPS_AT_WORK = 2
"""Steps that may be submitted and not done: their writes are still to come."""

WRITTEN = "nvme_written_gb"
"""The metric that a later start finds again: of all starts so far."""


class DiskUse:
    def __init__(self, engine: Engine, max_writes: int | None, *, before: int = 0) -> None:
        """before: bytes that earlier starts of the run have written."""
        self._engine, self._max_writes, self._before = engine, max_writes, before
        self._seen, self._since = engine.disk_traffic, time.perf_counter()

    @property
    def written(self) -> int:
        """Bytes, of all starts."""
        return self._before + self._engine.disk_traffic[1]

    def metrics(self) -> dict[str, float]:
        """GB/s since the last call, and GB so far; nothing where nothing is on disk."""
        if self._engine.folder is None:
            return {}
        now, at = self._engine.disk_traffic, time.perf_counter()
        read, written = ((b - a) / (at - self._since) / 1e9 for a, b in zip(self._seen, now, strict=True))
        self._seen, self._since = now, at
        return {"nvme_read_gbps": read, "nvme_write_gbps": written, WRITTEN: (self._before + now[1]) / 1e9}

    @property
    def is_spent(self) -> bool:
        """The steps that would be at work next could write more than there may be written."""
        to_come = STEPS_AT_WORK * self._engine.disk_writes_per_step
        return self._max_writes is not None and self.written + to_come > self._max_writes

    def sentence(self) -> str:
        before = f" {size(self._before)} of it by earlier starts," if self._before else ""
        return (
            f"{size(self.written)} were written to offload_dir,{before} and further steps would pass max_disk_writes "
            f"({size(self._max_writes or 0)})"
        )


def require_offload_dir(config: TrainConfig) -> None:
    """Raise BadInput where a run that is certain to need offload_dir could not have it now. One that may remove what is
    left there also waits for the end of another, so that it is not known yet."""
    shares = (config.optimizer_on_disk, config.weights_on_disk, config.activations_on_disk)
    if config.offload_dir is None or config.reuse_offload_dir or not any(shares):
        return
    refusal = look_at(Path(config.offload_dir), reuse=False).refusal
    if refusal is not None:
        raise BadInput(refusal)


def written_before(config: TrainConfig, checkpoints: int | None) -> int:
    """Bytes that earlier starts of a run that goes on have written: by its checkpoints, by run.json, which is written
    when steps begin and end, or by its metrics, where it was killed. checkpoints: what they say; None: there are none,
    and then one that finished was another run.

    Raises BadInput where max_disk_writes leaves nothing.
    """
    folder = Path(config.output_dir)
    if not config.resume_from_checkpoint or (checkpoints is None and _finished(folder)):
        return 0
    before = max([checkpoints or 0, *_noted(folder / METRICS, WRITTEN, 1e9), *_noted(folder / RUN, DISK_WRITES, 1)])
    if config.max_disk_writes is not None and before >= config.max_disk_writes:
        raise BadInput(
            f"earlier starts of this run have written {size(before)} to offload_dir, and max_disk_writes is "
            f"{size(config.max_disk_writes)}: set a larger limit"
        )
    return before


def filled_nbytes(layout: Layout, options: StepOptions, dtype: torch.dtype, *, goes_on: bool) -> int:
    """What a run writes before its first step: its state, as far as that lies on disk. dtype: of compute. goes_on: from
    a checkpoint; moments are zeros else, which nobody writes."""
    written = DTYPES if goes_on else ("weight", "residual")
    keep_residual = dtype is torch.float32
    return sum(
        plane_numel(layout, unit, plane, keep_residual=keep_residual) * DTYPES[plane].itemsize
        for plane, unit in options.disk
        if plane in written
    )


def require_writes_left(config: TrainConfig, filled: int, a_step: int, *, before: int = 0) -> None:
    """Raise BadInput where a run could not make its first steps within max_disk_writes. filled: see `filled_nbytes`.
    a_step: bytes that a step writes. before: as `DiskUse`."""
    least = filled + STEPS_AT_WORK * a_step
    if config.max_disk_writes is not None and before + least > config.max_disk_writes:
        after = f", after {size(before)} by earlier starts of this run" if before else ""
        raise BadInput(
            f"filling offload_dir and {STEPS_AT_WORK} steps write {size(least)}{after}, and max_disk_writes is "
            f"{size(config.max_disk_writes)}: set a larger limit, or keep more in host memory"
        )


def _finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / RUN).read_text(encoding="utf-8"))["status"] == FINISHED)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _noted(path: Path, key: str, unit: float) -> Iterator[int]:
    """Of a file that is one JSON object, or has one a line."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for piece in (text, *text.splitlines()):
        try:
            yield round(float(json.loads(piece)[key]) * unit)
        except (ValueError, KeyError, TypeError):
            continue
