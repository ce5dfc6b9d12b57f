"""Generates text with weights that slide: passes over all prompts, each a token further.

Works on a state of whatever engine, with buffers and lanes of its own; a slot for weights may be lent. A pass is queued
while the one before is at work, so that its first weights cross meanwhile, and is dropped if nobody needs it any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from slideformer.device import Device, Lane
from slideformer.engine.executor import Executor
from slideformer.engine.options import RING_PLACES
from slideformer.engine.pass_actions import PassActions
from slideformer.engine.reach import Held
from slideformer.engine.run import StepResult
from slideformer.engine.sequences import PassRun, Row, Sequences, pass_run, rows_of
from slideformer.errors import BadInput, RunFailed
from slideformer.layout import Layout
from slideformer.memory import Cell, State
from slideformer.memory.buffers import Need, Tier, make
from slideformer.memory.passes import PassShape, pass_needs
from slideformer.model.decoder import Decoder
from slideformer.model.sampling import Chooser, Sampling
from slideformer.native import HostKernels
from slideformer.schedule import (
    Buffer,
    LaneName,
    PassOptions,
    Place,
    Plan,
    StepOptions,
    Update,
    build_pass,
    pass_ops,
    prove,
)

if TYPE_CHECKING:
    from slideformer.engine.engine import Engine

Told = Callable[[list[tuple[int, int]]], None]
"""Hears after every pass which token each prompt got, as (number of the prompt, token)."""

SHARED = frozenset({Place.SLOT, Place.DENSE, Place.SLICE})
"""Places of weights that another plan may use when no pass is at work."""


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: of each prompt in the order given, its new ones, an end token included. Seconds of the passes over whole
    prompts, and of all others; busy: of the last pass that was not the first, per lane, and its seconds."""

    tokens: tuple[tuple[int, ...], ...]
    num_passes: int
    prompt_s: float
    decode_s: float
    decoded: int
    pass_s: float
    busy: Mapping[LaneName, float]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """Of the passes after the first, where there are any."""
        return self.decoded / self.decode_s if self.decoded else self.num_tokens / self.prompt_s


def options_of(options: PassOptions, micro_batches: int, *, first: bool) -> PassOptions:
    """The same for fewer micro-batches, in buffers that those have, too."""
    visits, rest = divmod(options.cached_on_device, options.micro_batches)
    stays = visits * micro_batches + min(rest, micro_batches)
    return replace(options, micro_batches=micro_batches, first=first, cached_on_device=stays)


def listed_passes(layout: Layout, options: PassOptions) -> list[Plan]:
    """Programs that between them name every buffer, without waits, so not to be run."""
    each = [options_of(options, n, first=f) for n in range(1, options.micro_batches + 1) for f in (True, False)]
    return [Plan(pass_ops(layout, o), (), trains=False, name="listed") for o in each]


def shape_of(decoder: Decoder, prompt_lengths: Sequence[int], max_new_tokens: int, micro_tokens: int) -> PassShape:
    """All prompts in one round, in as few micro-batches of at most so many tokens as they need."""
    if not prompt_lengths:
        raise BadInput("there are no prompts: give at least one")
    longest = max(prompt_lengths)
    rows = min(max(micro_tokens // max(longest, 1), 1), len(prompt_lengths))
    return PassShape(
        micro_batches=-(-len(prompt_lengths) // rows),
        rows=rows,
        prompt_length=longest,
        length=longest + max_new_tokens,
        hidden=decoder.hidden_size,
        dtype=decoder.dtype,
        cache_numel=decoder.cache_shape.numel,
    )


def pass_options(shape: PassShape, layout: Layout, *, window: int = 2, resident: tuple[int, ...] = ()) -> PassOptions:
    """Hidden states on the device, keys and values on the host."""
    return PassOptions(
        window=min(window, len(layout.blocks)),
        micro_batches=shape.micro_batches,
        hidden_pool=shape.micro_batches + 1,
        hidden_ring=2,
        fp32_compute=shape.dtype is torch.float32,
        resident=resident,
    )


def beside_nbytes(layout: Layout, shape: PassShape, *, disk_ring: int | None = None) -> tuple[int, int]:
    """What `Generation.beside` takes on device and host, at most. disk_ring: given where weights may be on disk."""
    options = pass_options(shape, layout)
    if disk_ring is not None:
        every = tuple((plane, unit) for plane in ("residual", "weight") for unit in range(len(layout.units)))
        options = replace(options, disk=every, disk_ring=disk_ring)
    needed = pass_needs(listed_passes(layout, options), layout, shape)
    own = [need for buffer, need in needed.items() if buffer.place not in SHARED]
    tiers = ((Tier.DEVICE,), (Tier.LOCKED, Tier.STAGING))
    device, host = (sum(n.nbytes for n in own if n.tier in tier) for tier in tiers)
    return device, host


def beside_options(step: StepOptions, layout: Layout, shape: PassShape) -> PassOptions:
    """Passes on what lies where a training step has it."""
    of_step = {f.name: getattr(step, f.name) for f in fields(step)}
    own = pass_options(shape, layout, window=step.window)
    of_passes = ("micro_batches", "hidden_pool", "hidden_ring", "fp32_compute", "first", "cached_on_device")
    training = {"ahead": (), "late": (), "keep": (), "update": Update.EAGER, "saved_on_disk": 0, "saved_over": 0}
    training["disk_ring"] = min(step.disk_ring, RING_PLACES)
    return PassOptions(**{**of_step, **training, **{name: getattr(own, name) for name in of_passes}})


class Generation:
    """Passes of one shape. Use from the thread that uses the state's engine, and when that is idle."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        kernels: HostKernels,
        state: State,
        shape: PassShape,
        options: PassOptions,
        lent: Mapping[Buffer, Held],
        lanes: dict[LaneName, Lane] | None = None,
    ) -> None:
        """lent: buffers of SHARED places that are there already. lanes: of the state's engine. Raises DoesNotFit."""
        self.decoder, self.device, self.layout, self.shape = decoder, device, state.layout, shape
        self._state, self._options = state, options
        self._plans: dict[tuple[int, bool], Plan] = {}
        needed = pass_needs(listed_passes(self.layout, options), self.layout, shape)
        own: dict[Buffer, Need] = {b: n for b, n in needed.items() if b not in lent}
        made, self._arenas = make(own, self.layout, state, device)
        buffers = {**made, **{b: lent[b] for b in needed if b in lent}}
        actions = PassActions(decoder, kernels, device, self.layout).table()
        self.executor = Executor(device, buffers, actions, lanes)
        self._sequences = buffers[Buffer(Place.SEQUENCES)]

    @classmethod
    def beside(cls, engine: Engine, shape: PassShape) -> Generation:
        """On the state of an engine that trains, in its slots for weights: nothing else of it is touched. Keys and
        values lie on the host. Raises DoesNotFit."""
        options = beside_options(engine.step_options, engine.layout, shape)
        lent = {b: held for b, held in engine.executor.buffers.items() if b.place in SHARED}
        lanes = engine.executor.lanes
        return cls(engine.decoder, engine.device, engine.kernels, engine.state, shape, options, lent, lanes)

    @property
    def usable(self) -> bool:
        """No run of it has failed or was left."""
        return not self.executor.interrupted

    def close(self) -> None:
        """Wait for what is under way and let go of all buffers, keys and values among them."""
        self.executor.wait_idle()
        self.executor.release()
        for arena in self._arenas:
            arena.page_unlock(self.device)
        self._arenas = ()

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = lambda _: None) -> Generated:
        """New tokens for every prompt; blocks. Raises BadInput for prompts that do not fit, LaneFailure, and whatever
        `told` raises: after any but the first, no other can follow.
        """
        rows = rows_of(prompts, self.decoder.vocab_size)
        self._check(rows, sampling)
        self._state.flush()
        chooser = Chooser(sampling, self.device.torch_device)
        clock = _Clock()
        # of like lengths together, so that little is padding
        waiting = sorted(rows, key=lambda row: (len(row.prompt), row.number))
        at_once = self.shape.micro_batches * self.shape.rows
        for start in range(0, len(waiting), at_once):
            self._round(waiting[start : start + at_once], sampling, chooser, clock, told)
        return clock.result(tuple(tuple(row.new) for row in rows))

    def _check(self, rows: Sequence[Row], sampling: Sampling) -> None:
        if not rows:
            raise BadInput("there are no prompts: give at least one")
        for row in rows:
            length, most = len(row.prompt) + sampling.max_new_tokens, self.decoder.num_positions
            if most is not None and length > most:
                raise BadInput(
                    f"prompt {row.number + 1} has {len(row.prompt)} tokens and may get {sampling.max_new_tokens}, and "
                    f"the model's position table has {most}: shorten it, or lower max_new_tokens"
                )
            if len(row.prompt) > self.shape.prompt_length or length > self.shape.length:
                raise BadInput(
                    f"prompt {row.number + 1} has {len(row.prompt)} tokens and may get {sampling.max_new_tokens}; "
                    f"there is room for {self.shape.prompt_length}, and {self.shape.length} with the new ones: shorten "
                    "it, or lower max_new_tokens"
                )

    def _round(self, rows: list[Row], sampling: Sampling, chooser: Chooser, clock: _Clock, told: Told) -> None:
        """As many prompts as there is room for at once, to their ends."""
        num_micro = -(-len(rows) // self.shape.rows)
        cuts = [len(rows) * i // num_micro for i in range(num_micro + 1)]
        sequences = Sequences([rows[a:b] for a, b in zip(cuts, cuts[1:], strict=False)], end_ids=sampling.end_ids)
        assert isinstance(self._sequences, Cell)
        self._sequences.value = sequences
        runs: dict[int, PassRun] = {}  # at work or queued
        clock.restart()
        try:
            for index in range(sampling.max_new_tokens):
                for ahead in range(index, min(index + 2, sampling.max_new_tokens)):
                    if ahead not in runs:
                        runs[ahead] = pass_run(sequences, chooser, ahead)
                        self.executor.submit(self._plan(num_micro, first=ahead == 0), runs[ahead])
                runs[index].marks[-1].wait()
                clock.passed(self._plan(num_micro, first=index == 0), runs[index], first=index == 0)
                told(runs.pop(index).taken)
                if all(row.done for row in rows):
                    break
        except BaseException:
            # A Ctrl-C may have come in the middle of a wait, whose mark then never wakes anybody again, or while a disk
            # hangs: nothing is waited for here, but by whoever closes the engine.
            self._drop(runs.values())
            self.executor.interrupted = True
            raise
        self._drop(runs.values())
        self.executor.synchronize()
        self._sequences.value = None

    @staticmethod
    def _drop(runs: Iterable[PassRun]) -> None:
        for run in runs:
            run.dropped = True

    def _plan(self, micro_batches: int, *, first: bool) -> Plan:
        if (micro_batches, first) not in self._plans:
            options = options_of(self._options, micro_batches, first=first)
            plan = build_pass(self.layout, options)
            prove(plan, self.layout, options)
            self._plans[micro_batches, first] = plan
        return self._plans[micro_batches, first]


class _Clock:
    """Adds up what passes take."""

    def __init__(self) -> None:
        self._prompt_s = self._decode_s = 0.0
        self._num_passes = self._decoded = 0
        self._last: tuple[Plan, PassRun, float] | None = None

    def restart(self) -> None:
        self._at = time.perf_counter()

    def passed(self, plan: Plan, run: PassRun, *, first: bool) -> None:
        now = time.perf_counter()
        took, self._at = now - self._at, now
        self._num_passes += 1
        if first:
            self._prompt_s += took
        else:
            self._decode_s += took
            self._decoded += len(run.taken)
        self._last = plan, run, took

    def result(self, tokens: tuple[tuple[int, ...], ...]) -> Generated:
        if self._last is None:
            raise RunFailed("no pass was run")
        plan, run, took = self._last
        busy = StepResult(plan, run).busy_s()
        return Generated(tokens, self._num_passes, self._prompt_s, self._decode_s, self._decoded, took, busy)
