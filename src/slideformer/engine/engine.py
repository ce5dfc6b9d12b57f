"""One training step or evaluation of a model that slides through the device.

Builds and proves the plans, allocates everything once, and turns batches into runs. `step` returns before the work is
done, so that a caller who submits the next step before asking for this one's loss keeps every lane busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from slideformer.data.batches import MicroBatch
from slideformer.device import Device, Mark
from slideformer.engine.actions import DeviceActions
from slideformer.engine.costs import Costs, disk_traffic, predicted_s
from slideformer.engine.executor import Executor, writes_state
from slideformer.engine.feed import Feed, build_feed, in_parts
from slideformer.engine.fit import listed
from slideformer.engine.generation import Generated, Generation, Told, shape_of
from slideformer.engine.host_actions import HostActions
from slideformer.engine.options import Decided, EngineOptions
from slideformer.engine.resident import ResidentUpdates
from slideformer.engine.run import Run, StepResult
from slideformer.engine.settle import settle, with_depth
from slideformer.engine.sliced_head import SlicedHeadActions
from slideformer.errors import BadInput, RunFailed
from slideformer.memory import DiskFolder, State, allocate, disk_rates
from slideformer.memory.state import PlaneName
from slideformer.model.decoder import Decoder
from slideformer.model.sampling import Sampling
from slideformer.native import HostKernels, available_cpus, load
from slideformer.schedule import Plan, build_evaluation, build_step, prove


class Engine:
    """Context manager: `close` ends its threads (not the device's other lanes' owners: the device is the caller's).

    plan: of a full training step. options: as given, with what was "auto" decided; step_options: what the plans were
    built with. budget: bytes by term and tier, on CUDA with an estimate of working memory. costs, predicted_step_s:
    what was measured at the start and the step time that it promises; None on the CPU. predicted_clipped_s: of a
    clipped step, where that may come. folder: of what is on disk; disk_reads_per_step, disk_writes_per_step: bytes, of
    a full step. decided: what the last bits depend on; as_earlier: it is what options.earlier says, as far as that was
    left open.
    """

    def __init__(
        self, decoder: Decoder, device: Device, options: EngineOptions, *, kernels: HostKernels | None = None
    ) -> None:
        """Plans, proves and allocates; weights are undefined until they are written (`write`). Raises BadInput,
        DoesNotFit.
        """
        self.decoder, self.device, self.options = decoder, device, options
        self.layout = decoder.layout
        self._shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
        self._closed = False
        self.costs: Costs | None = None
        self.folder: DiskFolder | None = None
        self._generation: Generation | None = None
        with ExitStack() as held:  # what is this engine's own, and goes with it
            self.kernels = kernels or load(options.cpu_threads or _update_threads(device))
            if kernels is None:
                held.callback(self.kernels.close)
            settled = settle(options, decoder, device, self.kernels)
            options = settled.options
            self._shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
            if options.uses_disk:
                through_host = device.kind == "cpu"  # whose memory is the device's: there is nothing to go around
                self.folder = DiskFolder(
                    Path(str(options.offload_dir)),
                    keep=options.keep_offload_dir,
                    reuse=options.reuse_offload_dir,
                    gds=options.gds and not through_host,
                )
                held.callback(self.folder.close)
                settled = replace(settled, costs=_with_disk_rate(settled.costs, self.folder))
            settled = with_depth(settled, decoder, device.kind)
            self.options = options = settled.options
            self.budget, self.costs, self.as_earlier = settled.budget, settled.costs, settled.as_earlier
            self.step_options = options.step_options(self.layout, decoder.dtype)
            self.decided = Decided(self.step_options.sliced_head, options.micro_batch_size)
            self._plans: dict[tuple[bool, int], Plan] = {}
            self.plan = self._plan(trains=True, micro_batches=options.micro_batches)
            per_step = disk_traffic(self.plan, self.layout, self._shape)
            self.disk_reads_per_step, self.disk_writes_per_step = per_step
            self.predicted_step_s = self._predicted_s(clipped=False)
            self.predicted_clipped_s = self._predicted_s(clipped=True)
            self.state = State(
                self.layout,
                device,
                self.kernels,
                keep_residual=decoder.dtype is torch.float32,
                ahead=self.step_options.ahead,
                resident=self.step_options.resident,
                disk=self.step_options.disk,
                folder=self.folder,
            )
            plans = listed(self.layout, options, decoder.dtype)
            made = allocate(plans, self.layout, self._shape, self.state, device, self.folder)
            self._arenas = made.arenas
            self._host = HostActions(self.layout, options, self.kernels)
            device_actions = {**DeviceActions(decoder, self.kernels).table(), **ResidentUpdates(self.layout).table()}
            device_actions |= SlicedHeadActions(decoder).table()
            self.executor = Executor(device, made.buffers, {**device_actions, **self._host.table()})
            self._held = held.pop_all()

    def _predicted_s(self, *, clipped: bool) -> float | None:
        if self.costs is None or (clipped and not self.options.max_grad_norm):
            return None
        return predicted_s(self.plan, self.layout, self._shape, self.costs, clipped=clipped)

    def _plan(self, *, trains: bool, micro_batches: int) -> Plan:
        """Plans are proven when they are built. The last step of an epoch may have fewer micro-batches."""
        key = (trains, micro_batches)
        if key not in self._plans:
            options = replace(self.step_options, micro_batches=micro_batches)
            plan = (build_step if trains else build_evaluation)(self.layout, options)
            prove(plan, self.layout, options)
            self._plans[key] = plan
        return self._plans[key]

    # weights

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        """Set master weights of a unit from `offset` on. Waits for steps under way. values: 1-D, float, host."""
        self._require_open()
        self.executor.synchronize()
        self.state.write(unit, offset, values)

    def read(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Master weights [start, stop) of a unit: a new fp32 tensor. Waits for steps under way.

        After a step that failed before it wrote anything: the weights of the step before. Raises RunFailed when it has
        left the state torn, or the engine is closed.
        """
        self._require_open()
        self._require_whole()
        return self.state.read(unit, start, stop)

    def settled_state(self) -> State:
        """The state between two steps: to be read before the next one. Waits and raises as `read`."""
        self._require_whole()
        return self.state

    def hold(self, unit: int, until: Mark) -> None:
        """No step from now on changes the unit's state before `until`, so that `state.part`, which asks for no step's
        end, may be called from another lane while the next step runs."""
        self.executor.hold(unit, until)

    @property
    def held_s(self) -> float:
        """Seconds for which updates have waited for holds, so far."""
        return self.executor.held_s

    def update_order(self) -> list[int]:
        """All units, in the order in which a step writes them."""
        first = {op.unit: index for index, op in reversed([*enumerate(self.plan.ops)]) if writes_state(op)}
        return sorted(range(len(self.layout.units)), key=lambda unit: first.get(unit, len(self.plan.ops)))

    def restore(self, unit: int, plane: PlaneName, offset: int, values: torch.Tensor) -> None:
        """Set elements of one plane of the state as `State.part` gave them. Waits for steps under way."""
        self._require_open()
        self.executor.synchronize()
        self.state.restore(unit, plane, offset, values)

    def restore_num_updates(self, num_updates: int) -> None:
        """Go on as if so many steps had been applied. Waits for steps under way."""
        self._require_open()
        self.executor.synchronize()
        self._host.updates.num_updates = num_updates

    def _require_open(self) -> None:
        if self._closed:
            raise RunFailed("the engine is closed: build another one")

    def _require_whole(self) -> None:
        self.executor.wait_idle()
        if self.executor.torn():
            raise RunFailed(
                "the last step failed after some weights were updated, so the state is torn and cannot be saved; "
                "start again from the last checkpoint"
            )

    # work

    @property
    def disk_traffic(self) -> tuple[int, int]:
        """Bytes read from the disk tier and written to it since it was opened, its measuring counted in."""
        return (0, 0) if self.folder is None else (self.folder.reads.nbytes, self.folder.writes.nbytes)

    def step(self, batch: Sequence[MicroBatch], *, lr: float) -> StepResult:
        """Queue one training step and return. Submit the next before reading this one's result.

        Raises BadInput for a batch that does not fit, LaneFailure when an earlier step failed.
        """
        if not 0 <= lr < math.inf:
            raise BadInput(f"the learning rate is {lr}, must be a finite number of at least 0")
        batch = self._in_parts(batch)
        feed = self._feed(batch)
        if feed.num_target_tokens == 0:
            raise BadInput("the batch has no target tokens: every label is -100, or every row is one token long")
        return self._submit(self._plan(trains=True, micro_batches=len(batch)), Run(feed, lr, trains=True))

    def evaluate(self, batch: Sequence[MicroBatch]) -> tuple[float, int]:
        """(sum of the target tokens' cross entropies, number of target tokens). Changes nothing; blocks."""
        batch = self._in_parts(batch)
        feed = self._feed(batch)
        if feed.num_target_tokens == 0:
            return 0.0, 0
        result = self._submit(self._plan(trains=False, micro_batches=len(batch)), Run(feed, 0.0, trains=False))
        return result.loss * feed.num_target_tokens, feed.num_target_tokens

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = lambda _: None) -> Generated:
        """New tokens for every prompt (token ids) with the weights as they are; blocks, and waits for steps under way.

        told: hears of each pass. Keys and values lie on the host, in memory that stays for calls that need no more.
        Raises BadInput, DoesNotFit, LaneFailure, and RunFailed as `read` does.
        """
        self._require_open()
        self._require_whole()
        lengths = [len(prompt) for prompt in prompts]
        shape = shape_of(self.decoder, lengths, sampling.max_new_tokens, self._shape.micro_tokens)
        if self._generation is None or not (self._generation.usable and self._generation.shape.covers(shape)):
            self._drop_generation()  # first, so that no two lie in memory
            self._generation = Generation.beside(self, shape)
        return self._generation.run(prompts, sampling, told)

    def _drop_generation(self) -> None:
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    def _in_parts(self, batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """As the engine takes it, if it was to find that out."""
        return in_parts(batch, self.options.micro_batch_size) if self.options.find_micro_batch else batch

    def _feed(self, batch: Sequence[MicroBatch]) -> Feed:
        return build_feed(
            batch,
            self._shape,
            self.layout,
            self.decoder.padding_idx,
            self.device.stage,
            num_positions=self.decoder.num_positions,
        )

    def _submit(self, plan: Plan, run: Run) -> StepResult:
        self._require_open()
        if self._generation is not None and not self._generation.usable:
            self._drop_generation()  # its lanes are these, and may be at work for it in slots that are lent to it
        self.state.flush()
        self.executor.submit(plan, run)
        return StepResult(plan, run)

    def synchronize(self) -> None:
        """Block until every submitted step is done. Raises LaneFailure."""
        self.executor.synchronize()

    @property
    def num_updates(self) -> int:
        """Steps applied so far, skipped ones not counted. Waits for steps under way."""
        self.executor.synchronize()
        return self._host.updates.num_updates

    def memory(self) -> dict[str, int]:
        """Bytes per tier: on the device, state on the host, and buffers and libraries there. Terms: `budget`."""
        b = self.budget
        return {"device": b.device_nbytes, "host_state": b.state_nbytes, "host_buffers": b.host_nbytes - b.state_nbytes}

    def close(self) -> None:
        """Wait for what is under way, end the engine's threads and give back the memory of all buffers, the device's
        among them, whoever still keeps the engine. Its `state` is there until nobody does. The device stays the
        caller's.

        Raises LaneFailure if a step failed and nobody has heard of it yet.
        """
        if self._closed:
            return
        self._closed = True
        failure = self.device.failure
        try:
            if not self.executor.interrupted and (failure is None or not failure.heard):
                self.executor.synchronize()
        finally:
            self.executor.wait_idle()  # what has failed may still be at work in other lanes, also for a generation
            with self._held:
                self._drop_generation()
                self.executor.release()
                for arena in self._arenas:
                    arena.page_unlock(self.device)
                self._arenas = ()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _with_disk_rate(costs: Costs | None, folder: DiskFolder) -> Costs | None:
    """With what the folder's disk moves when it is read and written at once, measured; nothing where nothing was."""
    if costs is None:
        return None
    rates = disk_rates(folder)
    return replace(costs, rates=replace(costs.rates, disk_nbytes=rates.both_read + rates.both_write))


def _update_threads(device: Device) -> int:
    """On CUDA one core is left to the launchers."""
    cpus = available_cpus()
    return max(cpus - 1, 1) if device.kind == "cuda" else cpus
