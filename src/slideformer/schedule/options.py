"""What a program depends on besides the layout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Update(StrEnum):
    EAGER = "eager"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Counts of slots, rings and micro-batches, and which program.

    window: slots for block weights. grad_slots: gradient buffers for blocks. ring: tiles in the gradient ring (eager).
    hidden_pool: device positions for saved inputs and hidden gradients that stay. hidden_ring: positions through
    which the others pass. fp32_compute: both planes are uploaded, and sums over micro-batches need no buffer.
    ahead: units that a deferred program updates before the norm is known, into a second copy of their state.
    late: blocks whose gradient an eager program leaves on the device until backward is over; they are updated after it,
    in the order of the next forward, under which that then happens.
    sliced_head: the output projection passes through the device tile by tile, twice.
    resident: units whose state is on the device; they are updated there and cross no link. keep: blocks among them that
    keep what backward needs from forward, instead of being run again.
    disk: (content, unit) pairs, a content being weight, residual, exp_avg or exp_avg_sq, that are on disk.
    disk_ring: places in each ring between disk and host. saved_on_disk: of what is spilled, so many positions,
    evenly among the first saved_over (0: as many), so that neither spills nor fetches come to the disk all at once;
    the others are on the host. gds: weights and saved inputs go between disk and device without passing the host;
    under fp32 compute only saved inputs, since weights are joined from two planes there.
    """

    window: int = 2
    grad_slots: int = 2
    ring: int = 4
    micro_batches: int = 1
    hidden_pool: int = 0
    hidden_ring: int = 4
    update: Update = Update.EAGER
    fp32_compute: bool = False
    ahead: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    sliced_head: bool = False
    resident: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    disk: tuple[tuple[str, int], ...] = ()
    disk_ring: int = 2
    saved_on_disk: int = 0
    saved_over: int = 0
    gds: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "grad_slots", "ring", "micro_batches", "disk_ring"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.hidden_pool < 0:
            raise ValueError(f"hidden_pool is {self.hidden_pool}, must be at least 0")
        if self.ahead and Update(self.update) is Update.EAGER:
            raise ValueError("an eager program updates every unit as it lands; only a deferred one updates ahead")
        if self.late and Update(self.update) is Update.DEFERRED:
            raise ValueError("a deferred program updates every unit after backward; only an eager one has late units")
        if both := set(self.late) & set(self.resident):
            raise ValueError(f"units {sorted(both)} are resident, so their gradient is not downloaded at all")
        if not set(self.keep) <= set(self.resident):
            raise ValueError(
                f"units {sorted(set(self.keep) - set(self.resident))} keep their graph but are not resident"
            )
        if both := set(self.ahead) & set(self.resident):
            raise ValueError(
                f"units {sorted(both)} are resident, so they have no second copy on the host to update ahead"
            )
        if both := {u for _, u in self.disk} & {*self.resident, *self.ahead}:
            raise ValueError(f"units {sorted(both)} are on disk, so they cannot be resident or have a second copy")
        if self.saved_on_disk < 0:
            raise ValueError(f"saved_on_disk is {self.saved_on_disk}, must be at least 0")
        if self.saved_over < 0:
            raise ValueError(f"saved_over is {self.saved_over}, must be at least 0")
        object.__setattr__(self, "update", Update(self.update))  # a plain "deferred" would compare equal, and not be it
