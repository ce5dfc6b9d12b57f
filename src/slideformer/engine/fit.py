"""What a run takes on each tier, whether it fits, and what to change if it does not. Allocates nothing.

For the engine before it allocates, and for whoever wants to know without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import torch

from slideformer.engine.costs import Costs
from slideformer.engine.options import EngineOptions
from slideformer.errors import DoesNotFit
from slideformer.layout import Layout
from slideformer.memory import Budget, Limit, available_nbytes, budget, host_limit, resident_nbytes, size
from slideformer.memory.disk_gds import SUM_NBYTES
from slideformer.schedule import Op, Plan, evaluation_ops, step_ops
from slideformer.schedule.disk import STRAIGHT, every_saved

log = logging.getLogger(__name__)

LARGE_TILE = 1 << 40
"""Elements: every unit is one tile."""


def listed(layout: Layout, options: EngineOptions, dtype: torch.dtype) -> list[Plan]:
    """Programs that between them name every buffer an engine needs, without waits, so not to be run: a training step
    and an evaluation with the most micro-batches, and all that a step's saved inputs may need on disk, since what is
    found staged with the most micro-batches is not with fewer. Apart from that fewer need no others."""
    full = options.step_options(layout, dtype)
    found = [(ops is step_ops, ops(layout, full)) for ops in (step_ops, evaluation_ops)]
    if full.saved_on_disk:
        on_host = replace(full, disk=(), saved_on_disk=0)
        large = replace(layout, tile_numel=LARGE_TILE)  # where hidden states lie does not depend on tiles
        found += [(True, (every_saved(step_ops(large, on_host), full),))]  # an evaluation needs no others
    return [Plan(ops, (), trains=trains, name="listed") for trains, ops in found]


def budget_of(
    layout: Layout, options: EngineOptions, *, hidden_size: int, dtype: torch.dtype, costs: Costs | None = None
) -> Budget:
    """Bytes by term and tier that an engine allocates for this layout (`decoder.layout`) and these options.

    hidden_size, dtype: the decoder's. costs: what torch's allocator takes beside the plan's buffers is counted too.
    Pure arithmetic, some milliseconds a block; needs no weights and no device. On the CPU backend both tiers are the
    host's memory: `.on_one_tier()`.
    """
    return _added_up(listed(layout, options, dtype), layout, options, hidden_size, dtype, costs)


def _added_up(
    plans: list[Plan],
    layout: Layout,
    options: EngineOptions,
    hidden_size: int,
    dtype: torch.dtype,
    costs: Costs | None,
) -> Budget:
    found = budget(plans, layout, options.batch_shape(hidden_size, dtype))
    for terms, nbytes in zip((found.device, found.host), options.beside_nbytes, strict=True):
        if nbytes:
            terms["samples"] = nbytes
    if costs is not None:
        of_block = dict(zip(layout.blocks, costs.blocks, strict=True))
        kept = () if options.keep == "auto" else options.keep
        sliced = options.step_options(layout, dtype).sliced_head  # not what is resident
        head_nbytes = costs.head_of(sliced=sliced).workspace_nbytes
        if sliced:  # and what is kept from slice to slice, gone before the first block's backward
            batch = options.batch_shape(hidden_size, dtype)
            per_token = 2 * dtype.itemsize + 4  # before and after the final norm, and the fp32 sum of its gradient
            head_nbytes += per_token * hidden_size * batch.tokens
        blocks_nbytes = costs.blocks_workspace_nbytes(layout, keep=kept, micro_batches=options.micro_batches)
        working = max(head_nbytes, blocks_nbytes)  # the head runs beside all kept graphs
        found.device["working memory"] = working + costs.library_nbytes
        if costs.host_library_nbytes:
            found.host["the device's libraries"] = costs.host_library_nbytes
        if costs.call_nbytes:  # those of all micro-batches, and the next step's first beside the one it replaces
            found.device["masks and positions"] = (options.micro_batches + 1) * costs.call_nbytes
        if options.gds and options.uses_disk:
            found.device["sums of what the disk moves"] = len(STRAIGHT) * SUM_NBYTES
        if kept:
            found.device["kept for backward"] = options.micro_batches * sum(of_block[u].kept_nbytes for u in kept)
    return found


class Budgets:
    """`budget_of` for one layout and its costs. Whoever looks for a placement asks for the same options several times;
    they are added up once, and the last one's program is at hand."""

    def __init__(self, layout: Layout, *, hidden_size: int, dtype: torch.dtype, costs: Costs | None = None) -> None:
        self._layout, self._hidden_size, self._dtype, self._costs = layout, hidden_size, dtype, costs
        self._found: dict[EngineOptions, Budget] = {}
        self._last: tuple[EngineOptions, Plan] | None = None

    def of(self, options: EngineOptions) -> Budget:
        if options not in self._found:
            plans = listed(self._layout, options, self._dtype)
            self._found[options] = _added_up(plans, self._layout, options, self._hidden_size, self._dtype, self._costs)
            self._last = (options, plans[0])
        return self._found[options]

    def step_ops(self, options: EngineOptions) -> tuple[Op, ...] | None:
        """Those of a full training step with these options, if they were asked about last."""
        return self._last[1].ops if self._last is not None and self._last[0] == options else None


def host_room(max_host_memory: int | None) -> Limit:
    """What the run may take on the host, and who says so: the config, or the machine with what is in use already."""
    machine = host_limit()
    left = Limit(max(machine.nbytes - resident_nbytes(), 0), f"{machine.name} that this process does not use yet")
    return left if max_host_memory is None else min(Limit(max_host_memory, "max_host_memory"), left)


def spare_room(max_host_memory: int | None) -> int:
    """Bytes that the run and its second copies may take together: `host_room`, without what anybody else uses now."""
    return min(host_room(max_host_memory).nbytes, available_nbytes())


def require_fit(
    layout: Layout,
    options: EngineOptions,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    device_kind: str,
    costs: Costs | None = None,
    free_nbytes: int | None = None,
    elsewhere: bool = False,
    found: Budget | None = None,
) -> Budget:
    """The budget, if it fits; else DoesNotFit with the terms, largest first, and the cheapest changes.

    Limits: max_gpu_memory for the device's buffers, and with `costs` for working memory; max_host_memory for state
    and host buffers; and for these with what the process takes already, the memory of the machine or its container.
    On the "cpu" device the device's buffers count as the host's. elsewhere: max_host_memory is all that counts.
    found: the budget, where it is known already. With options.ignore_memory_limits it is a warning.
    """
    found = found or budget_of(layout, options, hidden_size=hidden_size, dtype=dtype, costs=costs)

    def placed(b: Budget) -> Budget:
        return b.on_one_tier() if device_kind == "cpu" else b

    limits = [] if options.max_gpu_memory is None else [Limit(options.max_gpu_memory, "max_gpu_memory")]
    limits += [] if free_nbytes is None else [Limit(free_nbytes, "memory that is free on the GPU")]
    device = min(limits, default=None)
    host = Limit(options.max_host_memory or 0, "max_host_memory") if elsewhere else host_room(options.max_host_memory)

    def excess_of(cut: _Cut) -> tuple[int, int]:
        trial, smaller = cut.options, replace(layout, tile_numel=cut.tile_numel)
        share = (trial.micro_batch_size * trial.max_length) / (options.micro_batch_size * options.max_length)
        scaled = None if costs is None else costs.of_share(share)
        trial_budget = placed(budget_of(smaller, trial, hidden_size=hidden_size, dtype=dtype, costs=scaled))
        on_device, on_host = trial_budget.excess(device, host)
        return max(on_device, 0), max(on_host, 0)

    try:
        placed(found).require(device, host, advice=lambda: _advice(_Cut(options, layout.tile_numel), excess_of))
    except DoesNotFit as error:
        if not options.ignore_memory_limits:
            raise
        log.warning("%s", error)
    return found


LEAST_TILE = 4 << 20
"""Elements of a tile, at least, where smaller ones are advised: as bf16 8 MiB, which cross the link as fast as larger
pieces (4 MiB at 53 GB/s, the rest at 55; H200, 2026-11-30)."""


class _Cut(NamedTuple):
    """Options, and the tiles that the layout is cut into."""

    options: EngineOptions
    tile_numel: int


_ONLY_SPEED: tuple[Callable[[EngineOptions], EngineOptions], ...] = (
    lambda o: replace(o, ahead=()),
    lambda o: replace(o, late=()),
    lambda o: replace(o, resident=(), keep=()),
    lambda o: replace(o, grad_slots=1),
    lambda o: replace(o, saved_on_device=0),
    lambda o: replace(o, window=1),
    lambda o: replace(o, ring=min(o.ring, 2)),
)
_THE_RUN: tuple[Callable[[EngineOptions], EngineOptions], ...] = (
    lambda o: (
        replace(o, micro_batch_size=-(-_train_rows(o) // 2), micro_batches=2 * o.micro_batches)
        if _train_rows(o) > 1
        else o
    ),
    lambda o: replace(o, update="eager", max_grad_norm=0.0, on_nonfinite="stop"),
    lambda o: replace(o, micro_batches=-(-o.micro_batches // 2)),
    lambda o: replace(o, max_length=-(-o.max_length // 2)),
)


def _train_rows(options: EngineOptions) -> int:
    """Of a training micro-batch: micro_batch_size may be that of evaluation alone."""
    rows = options.micro_batch_size
    return rows if options.asked_rows is None else min(rows, options.asked_rows[0])


def _of_options(change: Callable[[EngineOptions], EngineOptions]) -> Callable[[_Cut], _Cut]:
    return lambda cut: cut._replace(options=change(cut.options))


_CHEAPER: tuple[Callable[[_Cut], _Cut], ...] = (
    *map(_of_options, _ONLY_SPEED),
    lambda cut: cut._replace(tile_numel=max(cut.tile_numel // 2, min(cut.tile_numel, LEAST_TILE))),
    _of_options(lambda o: replace(o, micro_batch_size=max(_train_rows(o), -(-o.micro_batch_size // 2)))),
    *map(_of_options, _THE_RUN),
)
"""Each takes one step towards less memory; cheapest first: those that cost only speed, then what changes the run."""

_TOGETHER = (
    ("ahead",),
    ("late",),
    ("resident", "keep"),
    ("grad_slots",),
    ("saved_on_device",),
    ("window",),
    ("ring",),
    ("micro_batch_size", "micro_batches"),
    ("update", "max_grad_norm", "on_nonfinite"),
    ("max_length",),
)
_CONFIG_KEYS = {
    "saved_on_device": "offload_activations",
    "resident": "placement",
    "ahead": "update_ahead",
    "micro_batch_size": "per_device_train_batch_size",
    "micro_batches": "gradient_accumulation_steps",
}


_WORDS = {"saved_on_device": "cpu", "resident": "stream", "ahead": "none"}
"""What a config says for the value that takes least."""


def _advice(given: _Cut, excess_of: Callable[[_Cut], tuple[int, int]]) -> str:
    """The cheapest changes that make it fit, or that nothing does. excess_of: bytes too many on device and host."""

    def excess_nbytes(trial: _Cut) -> int:
        return sum(excess_of(trial))

    changed, excess = given, excess_nbytes(given)
    for cheaper in _CHEAPER:
        while excess > 0:
            trial = cheaper(changed)
            trial_excess = excess if trial == changed else excess_nbytes(trial)
            if trial_excess >= excess:
                break
            changed, excess = trial, trial_excess
    options = given.options
    if excess > 0:
        helps = options.offload_dir is None and excess_of(changed)[1] > 0  # what is on the device lies on no disk
        disk = "give offload_dir, a folder on a fast disk, " if helps else ""
        return (
            f"With every setting at its smallest it is still {size(excess)} too much: {disk}use a smaller model, "
            "freeze parameters, or take a machine with more memory"
        )
    changed = _needed(given, changed, excess_nbytes)
    before, after = (_train_rows(cut.options) * cut.options.micro_batches for cut in (given, changed))
    another = "" if after == before else f", with {after} instead of {before} rows a step"
    return f"Cheapest change that makes it fit{another}: {', '.join(_differences(given, changed))}"


def _needed(given: _Cut, changed: _Cut, excess_nbytes: Callable[[_Cut], int]) -> _Cut:
    """Without those changes that are not needed after a later, larger one."""
    for fields in _TOGETHER:
        as_given = {name: getattr(given.options, name) for name in fields}
        trial = changed._replace(options=replace(changed.options, **as_given))
        if trial != changed and excess_nbytes(trial) <= 0:
            changed = trial
    trial = changed._replace(tile_numel=given.tile_numel)
    return trial if trial != changed and excess_nbytes(trial) <= 0 else changed


def _differences(given: _Cut, new: _Cut) -> Iterator[str]:
    for name in (f for fields in _TOGETHER for f in fields):
        of = _train_rows if name == "micro_batch_size" else attrgetter(name)
        value = of(new.options)
        if value != of(given.options) and name not in ("late", "keep"):  # no user sets these
            shown = _WORDS.get(name) or (f"{value:g}" if isinstance(value, float) else value)
            yield f"{_CONFIG_KEYS.get(name, name)}: {shown}"
    if given.options.asked_rows is not None and given.options.asked_rows[1] > new.options.micro_batch_size:
        yield f"per_device_eval_batch_size: {new.options.micro_batch_size}"
    if new.tile_numel != given.tile_numel:
        yield f"tile_numel: {new.tile_numel}"
