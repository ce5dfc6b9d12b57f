"""The protocol of a device: lanes that run work in order, marks that others wait for, and memory.

A lane is a FIFO with a thread of its own. On the CPU that thread does the work; on CUDA the thread of a device lane
launches work on the lane's stream, and the thread of a host lane does host work. `run` and `wait` return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from slideformer.errors import BadInput, RunFailed

MEASURED_S = 0.3
"""How long a piece of work is repeated to be timed: a GPU is slower when it works on and on than in its first moments
(steps took 6% longer than the best of three runs said; H200, 2026-11-30)."""


class LaneFailure(RunFailed):
    """The first failure of any lane. `__cause__` is the exception itself, with its own traceback.

    lane: the lane it happened in. label: what it was running. heard: it was raised in some caller already.
    """

    def __init__(self, lane: str, label: str, cause: BaseException) -> None:
        super().__init__(f"lane {lane} failed in {label}: {type(cause).__name__}: {cause}")
        self.lane, self.label, self.heard = lane, label, False
        self.__cause__ = cause


class Measured(NamedTuple):
    """What a piece of work took. peak_nbytes: device memory beside what was allocated before, at most; held_nbytes:
    while its result is alive. Both are 0 where the device's memory is the host's."""

    seconds: float
    peak_nbytes: int
    held_nbytes: int


class Mark(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """Block the calling thread until all work before the mark is done. Raises LaneFailure if it never will be."""

    def wait_issued(self) -> None:
        """Block until the lane's thread is through with the work (on a stream: has launched it) or has dropped it."""

    @property
    def completed(self) -> bool:
        """The work was run to its end: neither waiting, nor failed, nor dropped after a failure."""

    def span_s(self) -> tuple[float, float]:
        """Start and end of the work that the mark closes, in seconds of `time.perf_counter`. Only after `wait`."""


class Lane(Protocol):
    """A FIFO of work. Not for use by several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool:
        """Its thread has ended, because its device was closed."""

    def run(self, work: Callable[[], None], label: str = "") -> Mark:
        """Queue work; returns its mark at once. After a failure anywhere, queued work is dropped, not run.

        Raises RunFailed when the lane is closed.
        """
        ...

    def wait(self, mark: Mark) -> None:
        """Queue a wait: what is queued after this runs after `mark`. Returns at once."""
        ...


class Device(Protocol):
    """Lanes and memory of one device. Context manager: `close` ends every thread and frees what was page-locked.

    model: a GPU's name and number of multiprocessors, which launches are cut to; empty for a CPU. poisons: freed
    buffers are filled with NaN, so that a read that comes too late or too early is seen.
    """

    kind: str
    model: str
    torch_device: torch.device
    poisons: bool

    @property
    def failure(self) -> LaneFailure | None: ...

    def abandon(self, cause: BaseException) -> None:
        """Drop all queued work, as after a failure that the caller has heard of. What is at work comes to its end."""
        ...

    @property
    def page_locked_nbytes(self) -> int: ...

    def lane(self, name: str, *, host: bool) -> Lane:
        """A new lane; `host`: its work is done by its thread, not launched on the device."""
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory that lanes share, [numel]; contents undefined. Raises DoesNotFit when there is none left."""
        ...

    def page_lock(self, tensor: torch.Tensor) -> bool:
        """Page-lock host memory in place, for asynchronous copies. False where it is refused, and one warning for all:
        then copies are slower, and no different."""
        ...

    def page_unlock(self, tensor: torch.Tensor) -> None:
        """Take back `page_lock` of just this tensor, which no lane copies any more; nothing where it was refused."""
        ...

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor that can be copied to the device without blocking."""
        ...

    def anchor(self) -> None:
        """Tie the device's clock to the host's, for `Mark.span_s` of what is run from now on."""
        ...

    def synchronize(self) -> None:
        """Block until every lane is idle. Raises LaneFailure."""
        ...

    def settle(self) -> None:
        """Block until the device has done all that was launched on it, by whatever thread. Raises nothing."""
        ...

    def peak_nbytes(self) -> int:
        """Most device memory allocated at once so far (on the CPU: what `empty` handed out)."""
        ...

    def free_nbytes(self) -> int | None:
        """Device memory that can still be allocated; None where it is the host's."""
        ...

    def measure(self, work: Callable[[], object]) -> Measured:
        """Run work again and again in the calling thread, beside nothing else, and wait for the device; the mean."""
        ...

    def library_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes that a matrix library takes at the first product on a stream and keeps, as it does now for this thread.
        As `release_libraries` before."""
        ...

    def release_libraries(self) -> None:
        """Give back what a matrix library keeps on the device, on all streams. Nothing may be at work."""
        ...

    def limit_memory(self, nbytes: int) -> None:
        """Let this process take no more device memory until the device is closed; nothing where it is the host's."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Device: ...
    def __exit__(self, *exc: object) -> None: ...


def require_device(name: str) -> None:
    """Raise BadInput for a device that `open_device` would not open. Opens none."""
    from slideformer.device.cuda import cuda_available

    if name not in ("auto", "cpu", "cuda"):
        raise BadInput(f"device is {name!r}, must be auto, cpu or cuda")
    if name == "cuda" and not cuda_available():
        raise BadInput("device is cuda, but torch sees no CUDA device here; use device: cpu, or install a CUDA torch")


def open_device(name: str = "auto") -> Device:
    """The CUDA device, or the CPU. name: "auto" (CUDA where there is one), "cpu" or "cuda". Raises BadInput."""
    from slideformer.device.cpu import CpuDevice
    from slideformer.device.cuda import CudaDevice, cuda_available

    require_device(name)
    return CudaDevice() if name != "cpu" and cuda_available() else CpuDevice()
