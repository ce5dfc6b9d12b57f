"""The loop around the stock model and the peers: random tokens, warm-up, timing, one counted step, memory.

A peer is a `Peer`: it takes the tokens of a step and returns the loss on the device, without waiting. Times are between
the ends of consecutive steps, and losses are read one step late, so that no queue runs empty because it is timed.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from cases import Settings
from lines import GIB, host_peak_gib, spread
from shapes import random_tokens
from traffic import UpdateCount, copies


class Peer(Protocol):
    vocab_size: int
    threads: int

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Train on tokens [batch, seq] (host) and return the mean loss, a scalar on the device."""
        ...

    def synchronize(self) -> None:
        """Wait for all that earlier steps left to do."""
        ...

    def updates(self) -> AbstractContextManager[UpdateCount | None]:
        """Count the parameters updated inside; None where the peer does not let itself be counted."""
        ...

    def pinned_nbytes(self) -> int: ...


def open_torch_device(settings: Settings) -> torch.device:
    """The device of a case that runs on torch alone, with the case's limit set."""
    cuda = torch.cuda.is_available() and settings.device != "cpu"
    if cuda and settings.gpu_limit_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(settings.gpu_limit_gib * GIB / total)
    return torch.device("cuda" if cuda else "cpu")


def pinned_by_torch() -> int:
    """Page-locked bytes that torch's own allocator holds."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


class _Losses:
    """Losses, read one step late, and the seconds from one to the next by the clock of the device they come from."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self.values: list[float] = []
        self._stamps: list[float | torch.cuda.Event] = []
        self._waiting: torch.Tensor | None = None

    def push(self, loss: torch.Tensor) -> None:
        host = loss.detach().float()
        stamp: float | torch.cuda.Event = time.perf_counter()
        if self._cuda:
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
            host.copy_(loss.detach(), non_blocking=True)
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self.flush()
        self._waiting = host
        self._stamps.append(stamp)

    def flush(self) -> None:
        """Read the loss that is waiting."""
        if self._waiting is not None:
            if isinstance(stamp := self._stamps[-1], torch.cuda.Event):
                stamp.synchronize()
            self.values.append(float(self._waiting))
        self._waiting = None

    def steps_s(self) -> list[float]:
        """From each loss to the next."""
        times = []
        for before, after in zip(self._stamps, self._stamps[1:], strict=False):
            on_device = isinstance(before, torch.cuda.Event)
            times.append(before.elapsed_time(after) / 1e3 if on_device else after - before)
        return times


def run(peer: Peer, settings: Settings) -> dict[str, object]:
    """Warm up, measure, and count one more step; the case's part of its line."""
    cuda = torch.cuda.is_available() and settings.device != "cpu"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    num = settings.warmup + settings.steps
    batches = [random_tokens(i, settings.batch, settings.seq, peer.vocab_size) for i in range(num + 1)]
    losses = _Losses(cuda=cuda)
    for batch in batches[:num]:
        losses.push(peer.step(batch))
    losses.flush()
    peer.synchronize()
    memory = {  # before a step is counted: reading the driver's record takes host memory
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3) if cuda else 0.0,
        "gpu_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3) if cuda else 0.0,
        "host_peak_gib": host_peak_gib(),
        "pinned_gib": round(peer.pinned_nbytes() / GIB, 3),
    }
    with copies(cuda=cuda) as traffic, peer.updates() as count:
        peer.step(batches[num])
        peer.synchronize()
    return {
        "loss": [round(value, 5) for value in losses.values],
        "step_s": spread(losses.steps_s()[settings.warmup - 1 :]),
        "busy": traffic.busy,
        "bytes": {"up": traffic.up, "down": traffic.down} if cuda else None,
        "plan_bytes": None,
        "params_updated": None if count is None else count.numel,
        "predicted_step_s": None,
        "cpu_threads": peer.threads,
        **memory,
    }


def no_count() -> AbstractContextManager[None]:
    return nullcontext(None)
