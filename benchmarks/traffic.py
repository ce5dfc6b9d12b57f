"""What one step moves and updates, measured and not planned.

On CUDA the driver's own record of copies (CUPTI, through torch.profiler) is read: it sees every copy of this process,
whoever made it. On the CPU there is no link; copies that the threads of the transfer lanes make are counted instead.
Updates are counted where they happen: at the optimizer of torch, or at the functions of our native library.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slideformer.native import Planes
    from slideformer.schedule import Op

UP_LANES, DOWN_LANES = ("upload", "fetch"), ("download", "spill")


@dataclass(slots=True)
class Traffic:
    """Of one step. up, down: bytes to and from the device; busy: share of the step's time, by kind of work, where the
    driver was asked (profiling makes the step a little longer)."""

    up: int = 0
    down: int = 0
    busy: dict[str, float] = field(default_factory=dict)


@contextmanager
def copies(*, cuda: bool) -> Iterator[Traffic]:
    """Count the copies made inside. All work must be done before it opens, and done again before it closes."""
    traffic = Traffic()
    if cuda:
        with _driver_record(traffic):
            yield traffic
    else:
        with _lane_copies(traffic):
            yield traffic


@contextmanager
def _driver_record(traffic: Traffic) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        yield
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        read_record(json.loads(path.read_text())["traceEvents"], traffic)


def read_record(events: list[dict], traffic: Traffic) -> None:
    """Sum a Chrome trace of torch.profiler's into `traffic`."""
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "upload": [], "download": []}
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "kernel":
            lane = "compute"
        elif kind == "gpu_memcpy" and "HtoD" in name:
            lane, traffic.up = "upload", traffic.up + int(event["args"]["bytes"])
        elif kind == "gpu_memcpy" and "DtoH" in name:
            lane, traffic.down = "download", traffic.down + int(event["args"]["bytes"])
        else:
            continue
        spans[lane].append((event["ts"], event["ts"] + event["dur"]))
    whole = [span for lane in spans.values() for span in lane]
    if whole:
        took = max(end for _, end in whole) - min(start for start, _ in whole)
        traffic.busy = {lane: round(_covered(found) / took, 3) for lane, found in spans.items()}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


@contextmanager
def _lane_copies(traffic: Traffic) -> Iterator[None]:
    """By the name of the thread that copies: lanes' threads are called slideformer-<lane>."""
    moved: Counter[str] = Counter()
    plain = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        moved[threading.current_thread().name.removeprefix("slideformer-")] += source.nbytes
        return plain(target, source, *args, **kwargs)

    torch.Tensor.copy_ = counted  # type: ignore[method-assign, assignment]
    try:
        with _counted_joins(moved):
            yield
    finally:
        torch.Tensor.copy_ = plain  # type: ignore[method-assign]
    traffic.up = sum(moved[lane] for lane in UP_LANES)
    traffic.down = sum(moved[lane] for lane in DOWN_LANES)


@contextmanager
def _counted_joins(moved: Counter[str]) -> Iterator[None]:
    """Under fp32 compute an upload joins two planes on its way, without `copy_`."""
    from slideformer.native import NativeKernels, TorchKernels

    plain = {kind: kind.join for kind in (NativeKernels, TorchKernels)}

    def counted(kind: type) -> object:
        def join(kernels: object, weight: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
            moved[threading.current_thread().name.removeprefix("slideformer-")] += weight.nbytes + residual.nbytes
            plain[kind](kernels, weight, residual, out)

        return join

    for kind in plain:
        kind.join = counted(kind)
    try:
        yield
    finally:
        for kind, function in plain.items():
            kind.join = function


Where = tuple[int, int, int]
"""Unit, tile, and bytes from its start; of a tile that nobody knows, -1, -1 and the address."""


class UpdateCount:
    """Parameters that were updated, each counted once however often its state was written.

    They are told apart by the tile that the engine has in hand and where they are in it, since tiles that come from
    disk take turns in one place; and where nobody says which tile it is, by their address.
    """

    def __init__(self) -> None:
        self._tiles: dict[Where, int] = {}
        self._rows: dict[Where, tuple[torch.Tensor, int]] = {}
        self._in_hand = threading.local()
        self.others = 0

    def tile(self, weight: torch.Tensor) -> None:
        self._tiles[self._where(weight)] = weight.numel()

    def rows(self, weight: torch.Tensor, rows: torch.Tensor) -> None:
        seen, _ = self._rows.setdefault(
            self._where(weight), (torch.zeros(weight.shape[0], dtype=torch.bool), weight.shape[1])
        )
        seen[rows] = True

    @contextmanager
    def of_tile(self, unit: int, tile: int, weight: torch.Tensor) -> Iterator[None]:
        """What this thread updates inside is part of this tile. weight: all of it."""
        self._in_hand.tile = (unit, tile, weight.data_ptr())
        try:
            yield
        finally:
            del self._in_hand.tile

    def _where(self, weight: torch.Tensor) -> Where:
        unit, tile, start = getattr(self._in_hand, "tile", (-1, -1, 0))
        return unit, tile, weight.data_ptr() - start

    @property
    def numel(self) -> int:
        of_rows = sum(int(seen.sum()) * width for seen, width in self._rows.values())
        return self.others + sum(self._tiles.values()) + of_rows


@contextmanager
def our_updates(kernels: object) -> Iterator[UpdateCount]:
    """Count what our kernels are given inside: `update` and `update_rows` on the host, `update_` on the device."""
    count = UpdateCount()
    update, update_rows = kernels.update, kernels.update_rows

    def counted(weight: torch.Tensor, *args: object, **kwargs: object) -> None:
        count.tile(weight)
        update(weight, *args, **kwargs)

    def counted_rows(
        weight: torch.Tensor,
        residual: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        rows: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> None:
        count.rows(weight, rows)
        update_rows(weight, residual, exp_avg, exp_avg_sq, rows, *args, **kwargs)

    kernels.update, kernels.update_rows = counted, counted_rows
    try:
        with _tiles_in_hand(count), _device_updates(count):
            yield count
    finally:
        del kernels.update, kernels.update_rows


@contextmanager
def _tiles_in_hand(count: UpdateCount) -> Iterator[None]:
    """The engine's update lane says which tile it gives to the kernels."""
    from slideformer.engine.updates import Updates

    plain = {name: getattr(Updates, name) for name in ("_tile", "_some_rows")}

    def told(method: Callable[..., None]) -> Callable[..., None]:
        def call(updates: Updates, op: Op, planes: Planes, *args: object, **kwargs: object) -> None:
            with count.of_tile(op.unit, op.tile, planes.weight):
                method(updates, op, planes, *args, **kwargs)

        return call

    for name, method in plain.items():
        setattr(Updates, name, told(method))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(Updates, name, method)


@contextmanager
def _device_updates(count: UpdateCount) -> Iterator[None]:
    if find_spec("slideformer.engine.resident") is None:
        yield
        return
    resident = import_module("slideformer.engine.resident")
    update = resident.update_

    def counted(weight: torch.Tensor, *args: object, **kwargs: object) -> None:
        count.tile(weight)
        update(weight, *args, **kwargs)

    resident.update_ = counted
    try:
        yield
    finally:
        resident.update_ = update


@contextmanager
def torch_updates(optimizers: list[torch.optim.Optimizer]) -> Iterator[UpdateCount]:
    """Count the parameters that have a gradient when a torch optimizer steps inside."""
    count = UpdateCount()

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        count.others += sum(p.numel() for g in optimizer.param_groups for p in g["params"] if p.grad is not None)

    handles = [optimizer.register_step_pre_hook(before) for optimizer in optimizers]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()
