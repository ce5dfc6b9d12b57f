"""Engines that are ready soon: host memory that they take one after another, weights without a second pass over them,
and one measurement of the machine for all that run the same blocks.

Touching memory takes longer than all else. While a `HostPool` is open, arenas are parts of one mapping. Each engine
must be gone before `reset`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import slideformer.engine.fit as fit
import slideformer.engine.probe as probing
import slideformer.engine.settle as settle
import slideformer.memory.host as host
from shapes import random_pieces, random_weight
from slideformer.device import Device
from slideformer.engine import Engine, EngineOptions
from slideformer.engine.costs import Costs
from slideformer.model.decoder import Decoder
from slideformer.native import HostKernels

PAGE = 4096

STATE_NBYTES = 12.5
"""Bytes of host memory a parameter: the state, and some for what lies beside it."""


RATES = ("device_rate", "gather_rate", "link_rate", "update_rate")
"""Of the machine, as probe.py calls them."""

ALIKE = 0.02
"""Limits of a device's memory that differ by less are one: what is free on it varies a little."""


class HostPool:
    """Stands where memory/host.py has its mmap module; what exceeds the pool is mapped as ever. What the pool has
    touched and no engine holds counts as memory that the process does not use."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")
        self._used = self._touched = 0

    def reset(self, nbytes: int) -> None:
        """Nothing is taken, and there is room for so many bytes."""
        self._used = 0
        if nbytes > self._bytes.numel():
            self.free()
            memory = mmap.mmap(-1, nbytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._view = memoryview(memory)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def free(self) -> None:
        """Give the memory back."""
        self._used = self._touched = 0
        self._bytes, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")

    def mmap(self, fileno: int, nbytes: int) -> object:
        """The next bytes, zero; touched by many threads at once."""
        start, end = self._used, self._used + -(-nbytes // PAGE) * PAGE
        if end > self._bytes.numel():
            return mmap.mmap(fileno, nbytes)
        self._used, self._touched = end, max(end, self._touched)
        self._bytes[start:end].zero_()
        return self._view[start : start + nbytes]

    def resident_nbytes(self) -> int:
        """What the process takes, without what the pool could hand out again."""
        return max(self._resident_nbytes() - (self._touched - self._used), 0)

    def available_nbytes(self) -> int:
        """What a process could still take, with that."""
        return self._available_nbytes() + self._touched - self._used

    def __enter__(self) -> HostPool:
        self._before, host.mmap = host.mmap, self
        self._resident_nbytes = fit.resident_nbytes
        fit.resident_nbytes = self.resident_nbytes
        self._available_nbytes = fit.available_nbytes
        fit.available_nbytes = self.available_nbytes
        return self

    def __exit__(self, *exc: object) -> None:
        host.mmap = self._before
        fit.resident_nbytes = self._resident_nbytes
        fit.available_nbytes = self._available_nbytes
        self.free()


@contextmanager
def measured_once() -> Iterator[None]:
    """All engines share the rates of the machine; those with the same blocks and micro-batch, what these take.

    Where the device's limit is higher the same costs hold, if the whole head had room; where it is lower they are
    measured again.
    """
    found: dict[tuple[object, ...], list[tuple[int, Costs]]] = {}
    probe, rates = settle.probe, {name: getattr(probing, name) for name in RATES}

    def cached(decoder: Decoder, device: Device, options: EngineOptions, kernels: HostKernels) -> Costs:
        units = tuple(tuple((p.shape, p.trainable) for p in unit.params) for unit in decoder.layout.units)
        kinds = tuple(decoder.block_kind(i) for i in range(len(decoder.layout.blocks)))
        key = (units, kinds, str(decoder.kernels), options.micro_batch_size, options.max_length, kernels.threads)
        limit = options.max_gpu_memory or device.free_nbytes() or 0
        known = found.setdefault(key, [])
        for least, costs in known:
            if abs(limit - least) <= ALIKE * least or (limit > least and costs.head is not None):
                device.release_libraries()  # as the probe does, which ends what building the decoder has begun
                return costs
        known.append((limit, probe(decoder, device, options, kernels)))
        return known[-1][1]

    settle.probe = cached
    for name, rate in rates.items():
        setattr(probing, name, _first_answer(rate))
    try:
        yield
    finally:
        settle.probe = probe
        for name, rate in rates.items():
            setattr(probing, name, rate)


def _first_answer(rate: Callable[..., float]) -> Callable[..., float]:
    known: list[float] = []

    def answer(*args: object) -> float:
        if not known:
            known.append(rate(*args))
        return known[0]

    return answer


def fill(engine: Engine) -> None:
    """The weights of every case, drawn by name, in pieces, so that neither tier's peak is theirs. They are bf16, so the
    residuals are zero."""
    put = engine.state.restore
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            offset = unit.offsets[param.name]
            for piece in random_pieces(param.name, param.shape, engine.device.torch_device):
                put(index, "weight", offset, piece.cpu())
                put(index, "residual", offset, torch.zeros(piece.numel(), dtype=torch.int16))
                offset += piece.numel()


def fill_alike(engine: Engine) -> None:
    """Random weights, drawn once for all blocks."""
    drawn: dict[str, torch.Tensor] = {}
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            name = re.sub(r"\.\d+\.", ".0.", param.name)
            if name not in drawn:
                drawn[name] = random_weight(name, param.shape, engine.device.torch_device).cpu().flatten()
            engine.write(index, unit.offsets[param.name], drawn[name])
