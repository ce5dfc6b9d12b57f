"""Bytes on each tier, before anything is allocated: pure arithmetic on a layout, plans and the sizes of a batch.

A budget is what the engine then allocates, to the byte: state and buffers. What torch's allocator takes for the time
of one op (a block that is run again, a chunk of logits) is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from slideformer.errors import DoesNotFit
from slideformer.layout import Layout, UnitKind
from slideformer.memory.buffers import BatchShape, Tier, needs
from slideformer.memory.state import ARENAS, home_nbytes, state_nbytes
from slideformer.memory.stored import extent_nbytes, stored_nbytes
from slideformer.schedule import Buffer, Place, Plan
from slideformer.schedule.ops import STATE_PLACES

SMALL_SHARE = 0.02
"""Terms below this share of their tier are told as one, so that a message stays a sentence."""

NAMES = {
    Place.SLOT: "block slots",
    Place.GRAD: "block gradients",
    Place.GRAD_SUM: "block gradient sums",
    Place.DENSE_GRAD: "gradients",
    Place.DENSE_SUM: "gradient sums",
    Place.HIDDEN: "hidden states",
    Place.SLICE: "vocabulary slices",
    Place.SLICE_SUM: "vocabulary slices",
    Place.SLICE_GRAD: "vocabulary slices",
    Place.ROW_NORM: "norms and loss",
    Place.ROWS: "table rows",
    Place.ROW_GRAD: "table row gradients",
    Place.ROW_SUM: "table row gradient sums",
    Place.BATCH: "token ids",
    Place.NORM: "norms and loss",
    Place.LOSS: "norms and loss",
    Place.RING: "gradient ring",
    Place.GRAD_HOST: "waiting gradients",
    Place.SAVED: "saved inputs",
    Place.STAGED_STATE: "tiles between disk and host",
    Place.STAGED_WEIGHTS: "tiles between disk and host",
    Place.STAGED_SAVED: "tiles between disk and host",
    Place.ROWS_HOST: "table rows",
    Place.ROW_GRAD_HOST: "table row gradients",
    Place.NORM_HOST: "norms and loss",
    Place.LOSS_HOST: "norms and loss",
}


class Limit(NamedTuple):
    """How many bytes there may be, and who says so, as it should stand in a sentence ("max_host_memory")."""

    nbytes: int
    name: str


@dataclass(frozen=True)
class Budget:
    """Bytes by term. device: memory of the device. host: state (`state`, a subset) and page-locked buffers."""

    device: dict[str, int]
    host: dict[str, int]
    state: frozenset[str]
    disk: dict[str, int] = field(default_factory=dict)

    @property
    def device_nbytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_nbytes(self) -> int:
        return sum(self.host.values())

    @property
    def disk_nbytes(self) -> int:
        return sum(self.disk.values())

    @property
    def state_nbytes(self) -> int:
        return sum(nbytes for term, nbytes in self.host.items() if term in self.state)

    def on_one_tier(self) -> Budget:
        """The same where the device's memory is the host's: on the CPU."""
        moved = {f"{term} (device)": nbytes for term, nbytes in self.device.items()}
        return Budget({}, {**self.host, **moved}, self.state, self.disk)

    def fits(self, device_limit: Limit | None, host_limit: Limit | None) -> bool:
        return not any(over > 0 for over in self.excess(device_limit, host_limit))

    def excess(self, device_limit: Limit | None, host_limit: Limit | None) -> tuple[int, int]:
        """Bytes beyond the limits of device and host; 0 where there is no limit, negative where there is room."""
        return (
            0 if device_limit is None else self.device_nbytes - device_limit.nbytes,
            0 if host_limit is None else self.host_nbytes - host_limit.nbytes,
        )

    def require(
        self, device_limit: Limit | None, host_limit: Limit | None, *, advice: Callable[[], str] = lambda: ""
    ) -> None:
        """Raise DoesNotFit unless both tiers stay within their limits (None: no limit).

        The message names the tier, the need, the limit and the terms, largest first, and ends with `advice()`, which
        is asked for only then.
        """
        over = self.excess(device_limit, host_limit)
        tiers = (("device", self.device, device_limit, over[0]), ("host", self.host, host_limit, over[1]))
        sentences = [
            f"this run needs {size(sum(terms.values()))} on the {tier}, {size(excess)} more than the "
            f"{size(limit.nbytes)} of {limit.name}: {_listed(terms)}"
            for tier, terms, limit, excess in tiers
            if limit is not None and excess > 0
        ]
        if sentences:
            raise DoesNotFit(". ".join([*sentences, advice()]).removesuffix(". "))


def budget(plans: Iterable[Plan], layout: Layout, shape: BatchShape) -> Budget:
    """What an engine with these plans allocates for batches of `shape`, term by term. Allocates nothing itself.

    plans: every plan that will run (training and evaluation, with the most and the fewest micro-batches).
    """
    device: dict[str, int] = {}
    listed = list(plans)
    found = needs(listed, layout, shape)
    ahead, resident = (sorted({b.index[0] for b in found if b.place is p}) for p in (Place.SPARE, Place.HOME))
    keep_residual = _keeps_residual(shape)
    pairs = sorted({(str(b.place), b.index[0]) for plan in listed for b in plan.on_disk() if b.place in STATE_PLACES})
    terms = state_nbytes(layout, keep_residual=keep_residual, ahead=ahead, resident=resident, disk=pairs)
    host = {term: nbytes for term, nbytes in terms.items() if nbytes}
    stored = stored_nbytes(layout, pairs, keep_residual=keep_residual)
    disk = {ARENAS[content]: nbytes for content, nbytes in stored.items()}
    if resident:
        device["resident state"] = sum(home_nbytes(layout, u, keep_residual=keep_residual) for u in resident)
    state = frozenset(host)
    for buffer, need in found.items():
        tiers = {Tier.DEVICE: device, Tier.LOCKED: host, Tier.STAGING: host, Tier.DISK: disk}
        if need.tier in tiers:
            term, terms = _term(buffer, layout), tiers[need.tier]
            nbytes = extent_nbytes(need.numel * need.dtype.itemsize) if need.tier is Tier.DISK else need.nbytes
            terms[term] = terms.get(term, 0) + nbytes
    return Budget(device, host, state, disk)


def size(nbytes: float) -> str:
    """1.25 GiB, 40.0 MiB, 3.1 KiB."""
    for unit, floor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if nbytes >= floor / 2:
            return f"{nbytes / floor:.{digits}f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"


def _keeps_residual(shape: BatchShape) -> bool:
    return shape.dtype.itemsize == 4


def _term(buffer: Buffer, layout: Layout) -> str:
    if buffer.place in (Place.DENSE, Place.DENSE_GRAD, Place.DENSE_SUM):
        kind = layout.units[buffer.index[0]].kind
        matrix = kind in (UnitKind.TABLE, UnitKind.OUTPUT)
        if kind is UnitKind.BLOCK:
            return "resident gradients"
        owner = "vocabulary matrix" if matrix else "final norm" if kind is UnitKind.FINAL else "positions"
        return owner if buffer.place is Place.DENSE else f"{owner} {NAMES[buffer.place]}"
    return NAMES[buffer.place]


def _listed(terms: dict[str, int]) -> str:
    """Largest first; small ones together, last."""
    least = SMALL_SHARE * sum(terms.values())
    large = sorted(((n, t) for t, n in terms.items() if n >= least), key=lambda pair: (-pair[0], pair[1]))
    listed = [f"{term} {size(nbytes)}" for nbytes, term in large]
    rest = sum(n for n in terms.values() if n < least)
    return ", ".join([*listed, *([f"other {size(rest)}"] if rest else [])])
