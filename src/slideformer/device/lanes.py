"""The thread behind a lane, and what happens when one fails. Both backends build on it.

A failure anywhere sets one flag that all lanes see. From then on queued work is dropped and its marks are abandoned,
so every thread that waits for a mark wakes up, and nothing hangs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from slideformer.device.api import LaneFailure
from slideformer.errors import RunFailed

NOTICE_S = 0.1
"""How often a caller who waits for one lane looks whether another has failed."""


class Fault:
    """The first failure of any lane of one device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first: LaneFailure | None = None

    def report(self, lane: str, label: str, cause: BaseException) -> None:
        with self._lock:
            if self.first is None:
                self.first = LaneFailure(lane, label, cause)

    def abandon(self, cause: BaseException) -> None:
        """Drop queued work from now on, as after a failure that the caller has heard of."""
        self.report("caller", "abandon", cause)
        if self.first is not None:
            self.first.heard = True

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self.first is not None:
            self.first.heard = True
            raise self.first


class HostMark:
    """Closes work that a lane's own thread does."""

    __slots__ = ("_event", "_fault", "end_s", "start_s")

    def __init__(self, fault: Fault) -> None:
        self._event = threading.Event()
        self._fault = fault
        self.start_s = self.end_s = 0.0

    def set(self) -> None:
        self._event.set()

    def wait_issued(self) -> None:
        self._event.wait()

    def wait(self) -> None:
        while not self._event.wait(NOTICE_S):
            self._fault.check()
        if self.end_s == 0.0:  # dropped
            self._fault.check()

    @property
    def completed(self) -> bool:
        return self._event.is_set() and self.end_s > 0.0

    def span_s(self) -> tuple[float, float]:
        return self.start_s, self.end_s


class ThreadLane:
    """A FIFO with one thread. Subclasses say how work is run and how a mark is waited for on that thread."""

    def __init__(self, name: str, fault: Fault, *, nice: int = 0) -> None:
        """nice: how far the thread stands back when cores are short, as of a process (0 to 19)."""
        self.name = name
        self._nice = nice
        self.fault = fault
        self.closed = False
        self._queue: SimpleQueue[tuple[Callable[[], None] | None, HostMark | None, str]] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"slideformer-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None], label: str = "") -> HostMark:
        if self.closed:
            raise RunFailed(f"lane {self.name} was asked for {label or 'work'} after its device was closed")
        mark = self.new_mark()
        self._queue.put((work, mark, label))
        return mark

    def wait(self, mark: HostMark) -> None:
        self._queue.put((None, mark, ""))

    def close(self) -> None:
        """Let the queue run dry, then end the thread. Once is enough, twice does no harm."""
        self.closed = True
        self._queue.put((None, None, ""))
        self._thread.join()

    def new_mark(self) -> HostMark:
        return HostMark(self.fault)

    def prepare(self) -> None:
        """Runs once on the lane's thread, before anything else."""

    def execute(self, work: Callable[[], None], mark: HostMark) -> None:
        mark.start_s = time.perf_counter()
        work()
        mark.end_s = time.perf_counter()

    def await_mark(self, mark: HostMark) -> None:
        mark.wait_issued()

    def _loop(self) -> None:
        label = "start"
        if self._nice:
            with suppress(OSError, AttributeError):  # a system whose threads have no priority of their own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        try:
            self.prepare()
        except BaseException as error:  # whatever it is, the caller must hear of it
            self.fault.report(self.name, label, error)
        while True:
            work, mark, label = self._queue.get()
            if mark is None:
                return
            try:
                if self.fault.first is None:
                    if work is None:
                        self.await_mark(mark)
                    else:
                        self.execute(work, mark)
            except BaseException as error:  # likewise
                self.fault.report(self.name, label, error)
            finally:
                if work is not None:
                    mark.set()
                del work, mark
