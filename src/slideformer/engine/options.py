"""What an engine is built with. Everything that plans, memory and the optimizer need, validated together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from slideformer.errors import BadInput
from slideformer.layout import Layout
from slideformer.memory import BatchShape
from slideformer.optim import Hyper
from slideformer.schedule import StepOptions, Update
from slideformer.schedule.ops import STATE

WINDOW = 2
"""Blocks on the device at a time that room is first looked for."""

RING_PLACES = 4
"""Tiles in a ring between disk and host that room is first looked for, and that passes of generation take at most."""

CONTENTS = tuple(str(place) for place in STATE)
"""Of a unit's state; each may lie on disk."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Shares of the bytes beyond the device that go to disk, 0 to 1; None: as much as the host has no room for.

    moments: both of them, the second first. planes: of the masters, residuals before weights. saved: hidden states.
    """

    moments: float | None = None
    planes: float | None = None
    saved: float | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """What an engine decides by its room and its measurements and the last bits of its sums depend on; all else that it
    decides they do not. None: not known. micro_batch_size: rows that pass through the model together, at most."""

    sliced_head: bool | None = None
    micro_batch_size: int | None = None

    def holds_for(self, other: Decided) -> bool:
        """All that is known here is so there."""
        pairs = ((self.sliced_head, other.sliced_head), (self.micro_batch_size, other.micro_batch_size))
        return all(mine is None or mine == theirs for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of the largest batch (micro_batches of [micro_batch_size, max_length] tokens), the sliding window, and the
    optimizer.

    max_grad_norm: 0 is off; anything else needs the deferred update. on_nonfinite "skip" leaves the state as it was and
    goes on, and needs the deferred update too. cpu_threads: of the update; None is every CPU but one on CUDA, every CPU
    otherwise. max_gpu_memory, max_host_memory: bytes that the engine may allocate there; None is what the machine has.
    ignore_memory_limits: warn and go on where a limit will be exceeded. find_micro_batch: where micro-batches of this
    size have no room, each is taken as several smaller ones. asked_rows: of a training and of an evaluation batch,
    where both are given: micro_batch_size has room for either, and advice names the one that it means. window: blocks
    on the device at a time; "auto" is two, or one where two have no room.
    earlier: what an engine of the same run had decided: what is left open here is decided so again, if that has room.
    What lies where; "auto" is what has room and is fastest on CUDA, and on the CPU nothing out of the ordinary. Units
    are indices into the layout. saved_on_device: hidden states that stay on the device (None: all that there are).
    ahead: units that the deferred update writes ahead of the verdict, into a second copy of their state. late: blocks
    that an eager update takes after backward, from gradients that wait on the device. sliced_head: the output
    projection passes through the device tile by tile; "auto": where the whole of it has no room, or a step is faster so
    by more than measurements differ. resident: units whose state is on the device, where they are updated ("all": every
    one). keep: blocks among them that are not run again in backward. disk: (content, unit) pairs that are in files of
    the folder offload_dir, a content being weight, residual, exp_avg or exp_avg_sq. saved_on_disk: of the hidden states
    beyond those on the device, how many go to files, at most: evenly among the first saved_over of a step (0: as many).
    offload: decides these three. disk_ring: tiles in each ring between disk and host; "auto": as many as a step is
    faster for. gds: weights and saved inputs on disk go straight to the device and back. keep_offload_dir: the files
    stay at the end. reuse_offload_dir: what a killed run left there goes. beside_nbytes: what else will be taken beside
    the engine, on the device and on the host.
    """

    micro_batch_size: int = 1
    max_length: int = 2048
    micro_batches: int = 1
    window: int | Literal["auto"] = "auto"
    grad_slots: int = 2
    ring: int = 4
    saved_on_device: int | None | Literal["auto"] = "auto"
    hidden_ring: int = 4
    update: Literal["eager", "deferred"] = "deferred"
    max_grad_norm: float = 1.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    cpu_threads: int | None = None
    max_gpu_memory: int | None = None
    max_host_memory: int | None = None
    ignore_memory_limits: bool = False
    find_micro_batch: bool = False
    asked_rows: tuple[int, int] | None = None
    earlier: Decided | None = None
    ahead: tuple[int, ...] | Literal["auto"] = "auto"
    late: tuple[int, ...] | Literal["auto"] = "auto"
    sliced_head: bool | Literal["auto"] = "auto"
    resident: tuple[int, ...] | Literal["auto", "all"] = ()
    keep: tuple[int, ...] | Literal["auto"] = ()
    disk: tuple[tuple[str, int], ...] = ()
    saved_on_disk: int = 0
    saved_over: int = 0
    offload: Offload | None = None
    disk_ring: int | Literal["auto"] = "auto"
    gds: bool = False
    offload_dir: str | None = None
    keep_offload_dir: bool = False
    reuse_offload_dir: bool = False
    beside_nbytes: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "max_length", "micro_batches", "window", "grad_slots", "ring", "disk_ring"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.uses_disk and self.offload_dir is None:
            raise BadInput("state or saved inputs are to lie on disk, but offload_dir does not say where: set it")
        if self.hidden_ring < 2:
            raise BadInput(f"hidden_ring is {self.hidden_ring}, must be at least 2: one op holds two hidden states")
        if isinstance(self.saved_on_device, int) and self.saved_on_device < 0:
            raise BadInput(f"saved_on_device is {self.saved_on_device}, must be at least 0, or None for all")
        if not 0 <= self.max_grad_norm < math.inf:
            raise BadInput(f"max_grad_norm is {self.max_grad_norm}, must be a finite number, or 0 for no clipping")
        try:
            Hyper(0.0, self.beta1, self.beta2, self.eps, self.weight_decay)
        except ValueError as error:
            raise BadInput(str(error)) from None
        if self.update == "eager" and self.max_grad_norm > 0:
            raise BadInput(
                f"max_grad_norm is {self.max_grad_norm} with update: eager, which writes weights before the norm is "
                "known; use update: deferred, or max_grad_norm: 0"
            )
        if self.update == "eager" and self.on_nonfinite == "skip":
            raise BadInput(
                "on_nonfinite is skip with update: eager, which cannot take an update back; use update: deferred, or "
                "on_nonfinite: stop"
            )

    @property
    def slots(self) -> int:
        """Blocks of the window, as long as nobody has decided about it."""
        return WINDOW if self.window == "auto" else self.window

    @property
    def ring_places(self) -> int:
        """Of each ring between disk and host, as long as nobody has decided about them."""
        return RING_PLACES if self.disk_ring == "auto" else self.disk_ring

    @property
    def uses_disk(self) -> bool:
        return bool(self.disk) or self.saved_on_disk > 0

    def as_earlier(self) -> EngineOptions | None:
        """With what is open decided as it was `earlier`; None where that says nothing of it."""
        earlier, found = self.earlier or Decided(), self
        if self.sliced_head == "auto" and earlier.sliced_head is not None:
            found = replace(found, sliced_head=earlier.sliced_head)
        rows = earlier.micro_batch_size
        if self.find_micro_batch and rows is not None and rows < self.micro_batch_size:
            parts = -(-self.micro_batch_size // rows)
            found = replace(found, micro_batch_size=rows, micro_batches=parts * self.micro_batches)
        return None if found is self else found

    def batch_shape(self, hidden: int, dtype: torch.dtype) -> BatchShape:
        return BatchShape(self.micro_batches, self.micro_batch_size, self.max_length, hidden, dtype)

    def most_saved(self, layout: Layout) -> int:
        """Hidden states of a step that are worth a place on the device: every block's inputs, and a gradient each."""
        kept = () if self.keep == "auto" else set(self.keep) & set(layout.blocks)
        return (len(layout.blocks) - len(kept) + 1) * self.micro_batches

    def _check_units(self, layout: Layout) -> None:
        given = {name: getattr(self, name) for name in ("ahead", "late", "resident", "keep")}
        given["disk"] = tuple(u for _, u in self.disk)
        if wrong := sorted({c for c, _ in self.disk} - set(CONTENTS)):
            raise BadInput(f"disk names {wrong}, must be of {', '.join(CONTENTS)}")
        for name, units in given.items():
            allowed = layout.blocks if name in ("late", "keep") else range(len(layout.units))
            if isinstance(units, tuple) and (wrong := sorted(set(units) - set(allowed))):
                kind = "blocks" if name in ("late", "keep") else "units"
                raise BadInput(f"{name} names {wrong}, must be {kind} of the model, {allowed[0]} to {allowed[-1]}")
        if isinstance(self.keep, tuple) and isinstance(self.resident, tuple):
            if wrong := sorted(set(self.keep) - set(self.resident)):
                raise BadInput(f"keep names {wrong}, which resident does not: only resident blocks keep their graph")

    def step_options(self, layout: Layout, dtype: torch.dtype) -> StepOptions:
        self._check_units(layout)
        num_blocks = len(layout.blocks)
        most = self.most_saved(layout)
        pool = min(self.saved_on_device, most) if isinstance(self.saved_on_device, int) else most
        ahead = () if self.ahead == "auto" or self.update == "eager" else self.ahead
        late = () if self.late == "auto" or self.update == "deferred" else self.late
        resident = self.resident if isinstance(self.resident, tuple) else ()
        if self.resident == "all":
            resident = tuple(range(len(layout.units)))
        keep = () if self.keep == "auto" else self.keep
        return StepOptions(
            window=min(self.slots, num_blocks),
            grad_slots=min(self.grad_slots, num_blocks),
            ring=self.ring,
            micro_batches=self.micro_batches,
            hidden_pool=pool,
            hidden_ring=self.hidden_ring,
            update=Update(self.update),
            fp32_compute=dtype is torch.float32,
            ahead=tuple(u for u in ahead if layout.units[u].train_numel and u not in resident),
            late=tuple(u for u in late if layout.units[u].train_numel and u not in resident),
            sliced_head=self.sliced_head is True and layout.output not in resident,
            resident=resident,
            keep=keep,
            disk=tuple((c, u) for c, u in self.disk if u not in resident and u not in ahead),
            disk_ring=self.ring_places,
            saved_on_disk=self.saved_on_disk,
            saved_over=self.saved_over,
            gds=self.gds,
        )
