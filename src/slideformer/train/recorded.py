"""run.json beside a run's steps: written when they begin, and again with how they ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from slideformer.train.checkpoint import Progress
from slideformer.train.hardware import git_commit, hardware
from slideformer.train.journal import Journal
from slideformer.train.loop import Work
from slideformer.train.record import DISK_WRITES, FINISHED, RunRecord
from slideformer.train.stop import AT_ONCE_S, Stopped, within


@contextmanager
def recorded(
    record: RunRecord, journal: Journal, work: Work, start: Progress, peak: tuple[float, str] | None
) -> Iterator[None]:
    """peak: TFLOP/s of the device, and who says so. Raises RunFailed where the beginning cannot be written."""

    def now() -> dict[str, object]:
        return {DISK_WRITES: start.disk_writes + work.engine.disk_traffic[1], "last_metrics": journal.last}

    facts = {"device": work.device.kind, "num_steps": work.num_steps, "memory": work.engine.memory()}
    facts |= {"hardware": hardware(), "git": git_commit(Path.cwd()), DISK_WRITES: now()[DISK_WRITES]}
    if peak is not None:
        facts["peak_tflops"] = {"value": peak[0], "source": peak[1]}
    record.write("running", **facts, first_step=start.step + 1)
    try:
        yield
    except Stopped as stopped:
        write = partial(record.end, "stopped", **now())
        if stopped.at_once:
            work.device.abandon(stopped)
            within(AT_ONCE_S, write)
        else:
            write()
        raise
    except BaseException as error:
        record.end("failed", **now(), error=str(error))
        raise
    record.end(FINISHED, **now())
