"""Ctrl-C, SIGTERM, and SIGHUP of a terminal that goes away: the first asks the run to end after the step it is in, the
second ends it at once.

SIGUSR1 asks for a checkpoint after that step, and the run goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Self

from slideformer.device.lanes import Fault, ThreadLane

AT_ONCE_S = 2.0
"""How long a run that ends at once waits for a disk, so as to leave no half of anything where it does answer."""
STDERR = 2


class Stopped(Exception):  # noqa: N818 nothing went wrong
    """The run ended early because of a signal. The process should exit with 128 + signum."""

    def __init__(self, signum: int, where: str, *, at_once: bool = False) -> None:
        """at_once: work that is queued is not to be waited for."""
        self.signum, self.at_once = signum, at_once
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")


class StopRequests:
    """Catches these signals while it is entered, in the main thread. Python gives signals to no other: a run in one is
    stopped by whoever started it, through a callback. Under nohup SIGHUP stays ignored."""

    def __init__(self, ends: str = "the run ends after this step") -> None:
        """ends: what the first signal is answered with."""
        self._ends = ends
        self._signum: int | None = None
        self._save_asked = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            handler = self._caught_save if signum == signal.SIGUSR1 else self._caught
            try:
                self._previous[signum] = signal.signal(signum, handler)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _caught(self, signum: int, _frame: FrameType | None) -> None:
        if self._signum is not None:
            raise Stopped(signum, "at once, because it was the second signal", at_once=True)
        self._signum = signum
        said = f"\n{signal.Signals(signum).name}: {self._ends}; once more, and it ends at once\n"
        with suppress(OSError):  # past Python's own streams, which may be in the middle of a line
            os.write(STDERR, said.encode())

    def _caught_save(self, _signum: int, _frame: FrameType | None) -> None:
        self._save_asked = True

    @property
    def asked(self) -> bool:
        """A signal has come that ends the run."""
        return self._signum is not None

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self._save_asked = self._save_asked, False
        return asked

    def raise_if_asked(self, where: str) -> None:
        """Raise Stopped if a signal has come. where: what to say about how far the run is."""
        if self._signum is not None:
            raise Stopped(self._signum, where)


def within(seconds: float, work: Callable[[], None]) -> None:
    """Do `work` in a thread of its own, which is left behind if it takes longer: a disk may never answer."""
    fault = Fault()
    lane = ThreadLane("last-words", fault)
    mark = lane.run(work)
    until = time.monotonic() + seconds
    while not (done := mark.completed or fault.first is not None) and time.monotonic() < until:
        time.sleep(0.01)
    if done:
        lane.close()


def let_go(
    held: ExitStack, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
) -> None:
    """Close what a run that fails holds; if it ends at once, lanes that a disk keeps busy are left behind with it."""
    closing = held.pop_all()
    if isinstance(error, Stopped) and error.at_once:
        within(AT_ONCE_S, closing.close)
    else:
        closing.__exit__(kind, error, where)
