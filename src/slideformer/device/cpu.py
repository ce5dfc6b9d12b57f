"""The CPU as a device: every lane a thread, so that the engine meets the same races as on a GPU.

jitter_s delays each piece of work by a random time, and poison fills freed buffers with NaN: for tests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from slideformer.device.api import MEASURED_S, Lane, LaneFailure, Measured
from slideformer.device.lanes import Fault, HostMark, ThreadLane
from slideformer.errors import DoesNotFit


class CpuLane(ThreadLane):
    def __init__(self, name: str, fault: Fault, jitter: Callable[[], float] | None) -> None:
        self._jitter = jitter
        super().__init__(name, fault)

    def execute(self, work: Callable[[], None], mark: HostMark) -> None:
        if self._jitter is not None:
            time.sleep(self._jitter())
        super().execute(work, mark)


class CpuDevice:
    """See `Device`. jitter_s: longest random delay before each piece of work; seed: of the delays."""

    kind, model = "cpu", ""

    def __init__(self, *, jitter_s: float = 0.0, poison: bool = False, seed: int = 0) -> None:
        self.torch_device = torch.device("cpu")
        self.poisons = poison
        self._fault = Fault()
        self._lanes: list[CpuLane] = []
        self._jitter_s, self._seed = jitter_s, seed
        self._nbytes = 0

    @property
    def failure(self) -> LaneFailure | None:
        return self._fault.first

    def abandon(self, cause: BaseException) -> None:
        self._fault.abandon(cause)

    @property
    def page_locked_nbytes(self) -> int:
        return 0

    def lane(self, name: str, *, host: bool) -> Lane:
        jitter = None
        if self._jitter_s > 0:
            source = random.Random(f"{self._seed} {name}")
            jitter = lambda: self._jitter_s * source.random() ** 3  # noqa: E731  mostly short, sometimes long
        lane = CpuLane(name, self._fault, jitter)
        self._lanes.append(lane)
        return lane

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            tensor = torch.empty(numel, dtype=dtype)
        except RuntimeError as error:
            need = numel * dtype.itemsize / 2**30
            raise DoesNotFit(
                f"the host has no {need:.2f} GiB left for a buffer: lower window, max_length or the batch size, or "
                "free memory"
            ) from error
        self._nbytes += tensor.nbytes
        return tensor

    def page_lock(self, tensor: torch.Tensor) -> bool:
        return True  # host memory is device memory here: there is no copy that it could speed up

    def page_unlock(self, tensor: torch.Tensor) -> None:
        pass

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def anchor(self) -> None:
        pass

    def synchronize(self) -> None:
        for mark in [lane.run(lambda: None, "synchronize") for lane in self._lanes]:
            mark.wait()

    def settle(self) -> None:
        pass  # a lane's thread has done the work when its mark is issued

    def peak_nbytes(self) -> int:
        return self._nbytes

    def free_nbytes(self) -> None:
        return None

    def measure(self, work: Callable[[], object]) -> Measured:
        start, runs = time.perf_counter(), 0
        while runs == 0 or time.perf_counter() - start < MEASURED_S:
            work()
            runs += 1
        return Measured((time.perf_counter() - start) / runs, 0, 0)

    def library_nbytes(self, dtype: torch.dtype) -> int:
        return 0

    def release_libraries(self) -> None:
        pass

    def limit_memory(self, nbytes: int) -> None:
        pass

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def __enter__(self) -> CpuDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
