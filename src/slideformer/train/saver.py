"""Writes a run's checkpoints while the run goes on.

Each unit is copied between the update that the checkpoint is of and the next one, which waits for it (`Engine.hold`)
if it comes too early: into host memory as far as that is spare (`save_memory`), so that training waits for a memory
and not for a disk, and from there into its file; the others into their files at once. Flushing, the marker and the
rotation come after the last unit. The threads that write are the last to be given a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from slideformer.config import TrainConfig
from slideformer.device import Mark
from slideformer.device.lanes import Fault, ThreadLane
from slideformer.engine import Engine
from slideformer.errors import DoesNotFit
from slideformer.memory import size
from slideformer.native import available_cpus
from slideformer.train import checkpoint
from slideformer.train.checkpoint import Draft, Progress, Record, folder_name
from slideformer.train.console import Console
from slideformer.train.record import versions
from slideformer.train.retention import rotate
from slideformer.train.snapshot import Snapshot, spare_nbytes
from slideformer.train.stop import AT_ONCE_S, Stopped, within

MOST_LANES = 4
"""Files that are written and summed at once: a sum takes one core for about as long as a fast disk takes to write."""

NICE = 10
"""Of the threads that write: a sum that takes a core from an update makes the whole step wait."""


class _Writing:
    """A checkpoint on its way. end: of all its work; failure: why there will be none."""

    def __init__(self, draft: Draft, progress: Progress) -> None:
        self.draft, self.progress = draft, progress
        self.failure: BaseException | None = None
        self.start_s = self.end_s = time.perf_counter()
        self.waited_s = self.held_before_s = 0.0
        self.end: Mark | None = None


class Saver:
    """One checkpoint at a time. Use from one thread; as a context manager, which ends what is under way."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        console: Console,
        maths: dict[str, JsonValue],
        bits: dict[str, JsonValue],
    ) -> None:
        self.config, self.engine, self.console, self.maths, self.bits = config, engine, console, maths, bits
        # Of their own, so that the failure of a step does not end the checkpoint before it.
        self._fault = Fault()
        self._lanes: list[ThreadLane] = []  # the first copies to memory, the others write
        self._writing: _Writing | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self._populates = True  # until the first save, which is not to wait for that

    def save(self, progress: Progress) -> None:
        """Begin to write one, when the one before is complete; those too many are removed at its end.

        With save_in_background: false it is complete when this returns. Raises RunFailed: of the one before too.
        """
        self.wait()
        start, self._populates = time.perf_counter(), False
        self.engine.synchronize()
        config = self.config.model_dump(mode="json")
        record = Record(progress=progress, maths=self.maths, bits=self.bits, config=config, versions=dict(versions()))
        writing = _Writing(Draft(Path(self.config.output_dir), record, self.engine.layout), progress)
        writing.start_s, writing.held_before_s = start, self.engine.held_s
        writing.end = self._queued(writing)
        self._writing = writing
        writing.waited_s = time.perf_counter() - start
        if not self.config.save_in_background:
            self.wait()

    def _queued(self, writing: _Writing) -> Mark:
        """Hand all of it to the lanes; the mark is that of its end."""
        copies, *lanes = self._open_lanes()
        snapshots = self._snapshots
        copied: dict[int, Mark] = {}
        for unit, snapshot in snapshots.items():
            work = partial(self._guarded, writing, partial(snapshot.take, self.engine.state))
            copied[unit] = copies.run(work, f"unit {unit}'s copy")
            self.engine.hold(unit, copied[unit])
        written: list[Mark] = []
        order = self.engine.update_order()
        last = [unit for unit in order if unit in snapshots]  # nobody waits for these
        for place, unit in enumerate([unit for unit in order if unit not in snapshots] + last):
            lane = lanes[place % len(lanes)]
            if unit in copied:
                lane.wait(copied[unit])
            source = snapshots.get(unit, self.engine.state)
            work = partial(self._guarded, writing, partial(writing.draft.unit, unit, source))
            written.append(lane.run(work, f"unit {unit} of a checkpoint"))
            if unit not in copied:
                self.engine.hold(unit, written[-1])
        for mark in written:
            lanes[0].wait(mark)
        return lanes[0].run(partial(self._finish, writing), "the end of a checkpoint")

    @property
    def is_done(self) -> bool:
        """Nothing is under way, or it has come to its end and `wait` will not block."""
        return self._writing is None or self._writing.end.completed

    def wait(self) -> None:
        """Block until what was begun is complete, and tell of it. Raises RunFailed if it will not be."""
        writing = self._writing
        if writing is None:
            return
        start = time.perf_counter()
        writing.end.wait()
        self._writing = None
        if writing.failure is not None:
            raise writing.failure
        waited_s = writing.waited_s + time.perf_counter() - start + self.engine.held_s - writing.held_before_s
        seconds = writing.end_s - writing.start_s
        told = checkpoint.told(writing.draft.nbytes, seconds)
        name = folder_name(writing.progress.step)
        self.console.note(f"{name}: {told}, for which training waited {min(waited_s, seconds):.1f} s")

    def _open_lanes(self) -> list[ThreadLane]:
        if not self._lanes:
            on_disk = self.engine.state.stored is not None  # where several would take each other's place in hand
            count = 1 if on_disk else max(1, min(MOST_LANES, available_cpus() // 4))
            self._lanes = [ThreadLane("checkpoint-copies", self._fault)]
            self._lanes += [ThreadLane(f"checkpoint-{index}", self._fault, nice=NICE) for index in range(count)]
        return self._lanes

    def _take_spare(self) -> None:
        """Memory for copies of the units that are updated first, as far as there is any. State in files stays there."""
        state, budget = self.engine.state, self.engine.budget
        if not self.config.save_in_background or state.stored is not None:
            return
        left = spare_nbytes() - self.engine.options.beside_nbytes[1]
        if self.engine.device.kind == "cpu":  # whose buffers are the host's, and not all touched yet
            left, budget = left - budget.device_nbytes, budget.on_one_tier()
        if self.config.max_host_memory is not None:
            left = min(left, self.config.max_host_memory - budget.host_nbytes)
        if self.config.save_memory is not None:
            left = min(left, self.config.save_memory)
        order = self.engine.update_order()
        for unit in order:
            nbytes = Snapshot.nbytes_of(unit, state)
            if nbytes > left:
                continue
            with suppress(DoesNotFit):
                self._snapshots[unit] = Snapshot(self.engine.layout, unit, state)
                left -= nbytes
        self.console.note(self._told_spare(len(order)))
        for snapshot in self._snapshots.values():
            self._open_lanes()[-1].run(partial(snapshot.populate, lambda: self._populates), "memory for checkpoints")

    def _told_spare(self, num_units: int) -> str:
        copied, wait = len(self._snapshots), "updates wait until their units are in its files"
        if not copied:
            return f"while a checkpoint is written, {wait}: no memory is spare for copies"
        nbytes = size(sum(snapshot.nbytes for snapshot in self._snapshots.values()))
        rest = f"; {wait} where there is none" if copied < num_units else ""
        return f"checkpoints are written from copies of {copied} of {num_units} units in {nbytes} of spare memory{rest}"

    def _guarded(self, writing: _Writing, work: Callable[[], object]) -> None:
        """In a lane. The unit is held, or is a copy, so its state is that of the checkpoint's step."""
        if writing.failure is None:
            try:
                work()
            except BaseException as failure:  # raised in the caller, by `wait`
                writing.failure = failure

    def _finish(self, writing: _Writing) -> None:
        if writing.failure is None:
            try:
                writing.draft.finish()
            except BaseException as failure:  # likewise
                writing.failure = failure
        if writing.failure is not None:
            writing.draft.discard()
            return
        best = writing.progress.best_saved if self.config.load_best_model_at_end else None
        rotate(Path(self.config.output_dir), writing.progress.step, self.config.save_total_limit, best=best)
        writing.end_s = time.perf_counter()

    @contextmanager
    def running(self) -> Iterator[Saver]:
        """Ends what is under way: by waiting for it, whatever else has failed, unless all is to end at once."""
        try:
            self._take_spare()
            yield self
            self.wait()
        except Stopped as stopped:
            if stopped.at_once:
                self._abandon(stopped)
            raise
        except BaseException:
            try:
                self.wait()
            except Exception as failure:  # what is being raised comes first
                self.console.warn(str(failure))
            raise
        finally:
            self._populates = False
            if self._fault.first is None:  # else `_abandon` has done what can be done
                for lane in self._lanes:
                    lane.close()
            self._snapshots.clear()

    def _abandon(self, stopped: Stopped) -> None:
        """Drop what is queued. Threads whose disk hangs are left to the end of the process."""
        self._fault.abandon(stopped)
        within(AT_ONCE_S, self._clear)

    def _clear(self) -> None:
        for lane in self._lanes:
            lane.close()
        if self._writing is not None:
            self._writing.draft.discard()
