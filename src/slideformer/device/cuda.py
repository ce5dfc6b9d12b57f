"""CUDA (and ROCm through the same torch API) as a device. The only file that says torch.cuda.

A device lane is a stream with a launcher thread: the thread waits until what it depends on has been *launched*, then
makes the stream wait for it; so a launcher may run far ahead of the device. It blocks only for host lanes' work.
A host lane waits for events in the kernel, not spinning: the cores belong to the update.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from slideformer.device.api import MEASURED_S, Lane, LaneFailure, Measured
from slideformer.device.lanes import Fault, HostMark, ThreadLane
from slideformer.errors import DoesNotFit

log = logging.getLogger(__name__)

PRODUCT = 1024  # width of the matrix product with which a library is tried


def cuda_available() -> bool:
    return torch.cuda.is_available()


def _let_segments_grow() -> None:
    """Have torch's allocator map memory into segments that grow, unless the user has said whether it should: in those
    of fixed sizes working memory left gaps of up to 3.3 GiB under a limit of 24 (8B shape, H200, 2026-11-30)."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # not in torch 2.11
    now = ask() if ask else os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" not in now:
        change = (
            getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        )
        change(",".join(filter(None, (now, "expandable_segments:True"))))


class _Anchor:
    """One moment on both clocks."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        stream.synchronize()
        self.event.record(stream)
        self.event.synchronize()
        self.host_s = time.perf_counter()


class StreamMark(HostMark):
    """Closes work on a stream. `wait_issued` returns once it has been launched; `wait` once it is done."""

    __slots__ = ("anchor", "done", "start")

    def __init__(self, fault: Fault, anchor: _Anchor) -> None:
        super().__init__(fault)
        self.anchor = anchor
        self.start = torch.cuda.Event(enable_timing=True)
        self.done = torch.cuda.Event(enable_timing=True, blocking=True)

    def wait(self) -> None:
        super().wait()
        self.done.synchronize()

    @property
    def completed(self) -> bool:
        return super().completed and self.done.query()

    def span_s(self) -> tuple[float, float]:
        base = self.anchor
        start, end = (base.event.elapsed_time(e) / 1e3 for e in (self.start, self.done))
        return base.host_s + start, base.host_s + end


class CudaHostLane(ThreadLane):
    """Host work that may wait for streams."""

    def __init__(self, name: str, device: CudaDevice) -> None:
        self._device = device
        super().__init__(name, device.fault)

    def prepare(self) -> None:
        torch.cuda.set_device(self._device.torch_device)

    def await_mark(self, mark: HostMark) -> None:
        mark.wait_issued()
        if isinstance(mark, StreamMark) and self.fault.first is None:
            mark.done.synchronize()


class StreamLane(CudaHostLane):
    """Work launched on a stream of its own."""

    def __init__(self, name: str, device: CudaDevice) -> None:
        self.stream = torch.cuda.Stream(device.torch_device)
        super().__init__(name, device)

    def prepare(self) -> None:
        super().prepare()
        torch.cuda.set_stream(self.stream)

    def new_mark(self) -> HostMark:
        return StreamMark(self.fault, self._device.clock)

    def execute(self, work: Callable[[], None], mark: HostMark) -> None:
        assert isinstance(mark, StreamMark)
        mark.start.record(self.stream)
        work()
        mark.done.record(self.stream)
        mark.end_s = time.perf_counter()  # launched; `span_s` asks the stream's events

    def await_mark(self, mark: HostMark) -> None:
        mark.wait_issued()
        if isinstance(mark, StreamMark) and self.fault.first is None:
            self.stream.wait_event(mark.done)


class CudaDevice:
    """See `Device`."""

    kind = "cuda"
    poisons = False

    def __init__(self, index: int = 0) -> None:
        _let_segments_grow()
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.model = f"{properties.name} with {properties.multi_processor_count} multiprocessors"
        self.fault = Fault()
        self._lanes: list[CudaHostLane] = []
        self._locked: dict[int, torch.Tensor] = {}  # by address
        self._refused = False  # to lock some, and told so
        self._fraction_before: float | None = None
        self._clock_stream = torch.cuda.Stream(self.torch_device)
        self.clock = _Anchor(self._clock_stream)
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    @property
    def failure(self) -> LaneFailure | None:
        return self.fault.first

    def abandon(self, cause: BaseException) -> None:
        self.fault.abandon(cause)

    @property
    def page_locked_nbytes(self) -> int:
        return sum(t.nbytes for t in self._locked.values())

    def lane(self, name: str, *, host: bool) -> Lane:
        lane = CudaHostLane(name, self) if host else StreamLane(name, self)
        self._lanes.append(lane)
        return lane

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(numel, dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            need = numel * dtype.itemsize / 2**30
            raise DoesNotFit(
                f"the GPU has no {need:.2f} GiB left for a buffer ({free / 2**30:.2f} of {total / 2**30:.2f} GiB are "
                "free): lower window, max_length or the batch size, or free the GPU"
            ) from error

    def page_lock(self, tensor: torch.Tensor) -> bool:
        if tensor.nbytes == 0:
            return True
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(status) == 0:
            self._locked[tensor.data_ptr()] = tensor
            return True
        log.log(
            logging.INFO if self._refused else logging.WARNING,
            "%.2f GiB of host memory could not be page-locked (%s): copies from it run at about a seventh of the "
            "link's speed and block their lane",
            tensor.nbytes / 2**30,
            runtime.cudaGetErrorString(status),
        )
        self._refused = True
        self._forget_error()
        return False

    def _forget_error(self) -> None:
        """The runtime keeps the error of a refused call for this thread's next launch to raise: have it be this one.
        torch has no binding for cudaGetLastError (2.11 to 2.13)."""
        with suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def page_unlock(self, tensor: torch.Tensor) -> None:
        if self._locked.pop(tensor.data_ptr(), None) is None:
            return
        if int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())) != 0:
            self._forget_error()

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def anchor(self) -> None:
        self.clock = _Anchor(self._clock_stream)

    def synchronize(self) -> None:
        for mark in [lane.run(lambda: None, "synchronize") for lane in self._lanes]:
            mark.wait()

    def settle(self) -> None:
        with suppress(RuntimeError):  # after a fault of the device itself there is nothing to wait for
            torch.cuda.synchronize(self.torch_device)

    def peak_nbytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def free_nbytes(self) -> int:
        """Free on the card, or left of torch's limit for this process, with what its allocator holds unused."""
        held = torch.cuda.memory_reserved(self.torch_device)
        unused = held - torch.cuda.memory_allocated(self.torch_device)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.torch_device) * total)
        return min(free, allowed - held) + unused

    def measure(self, work: Callable[[], object]) -> Measured:
        """Once to warm up, which is when memory is looked at. Gives back what the allocator then holds unused."""
        where = self.torch_device
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        result = work()
        torch.cuda.synchronize(where)
        peak, held = torch.cuda.max_memory_allocated(where) - before, torch.cuda.memory_allocated(where) - before
        del result
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(where)
        runs = max(int(MEASURED_S / (time.perf_counter() - began)), 1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            work()
        end.record()
        end.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
        return Measured(start.elapsed_time(end) / 1e3 / runs, peak, held)

    def library_nbytes(self, dtype: torch.dtype) -> int:
        self.release_libraries()  # or nothing more would be taken
        square = torch.zeros(PRODUCT, PRODUCT, dtype=dtype, device=self.torch_device)

        def product() -> None:
            square @ square

        return self.measure(product).held_nbytes

    def release_libraries(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch._C._cuda_clearCublasWorkspaces()

    def limit_memory(self, nbytes: int) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        if self._fraction_before is None:
            self._fraction_before = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        fraction = min(nbytes / total, self._fraction_before)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        if self.fault.first is None:
            torch.cuda.synchronize(self.torch_device)
        for tensor in list(self._locked.values()):
            self.page_unlock(tensor)
        torch._C._cuda_clearCublasWorkspaces()  # one a stream, and another device's streams are others
        if self._fraction_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.torch_device)
            self._fraction_before = None

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
