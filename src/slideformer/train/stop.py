"""Ctrl-C and SIGTERM: the first asks the run to end after the step it is in, the second ends it at once.

SIGUSR1 asks for a checkpoint after that step, and the run goes on.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Stopped(Exception):  # noqa: N818 nothing went wrong
    """The run ended early because of a signal. The process should exit with 128 + signum."""

    def __init__(self, signum: int, where: str, *, at_once: bool = False) -> None:
        """at_once: work that is queued is not to be waited for."""
        self.signum, self.at_once = signum, at_once
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")


class StopRequests:
    """Catches SIGINT, SIGTERM and SIGUSR1 while it is entered, in the main thread. Python gives signals to no other: a
    run in one is stopped by whoever started it, through a callback."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._save_asked = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
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
