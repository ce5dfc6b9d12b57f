"""What a config takes before anything is loaded: bytes by tier, and a step on a virtual clock."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from slideformer.config import TrainConfig
from slideformer.engine import EngineOptions, require_fit
from slideformer.engine.ahead import fastest_ahead
from slideformer.engine.costs import (
    ASSUMED,
    Costs,
    Rates,
    assumed,
    cost_of,
    disk_traffic,
    largest_block_numel,
    predicted_s,
)
from slideformer.engine.fit import Budgets, host_room, spare_room
from slideformer.engine.placement import Room, place, placed
from slideformer.engine.settle import (
    budgets_of,
    deepened,
    halved,
    streamed,
    unplaced,
    warn_of_no_gpu,
    with_disk,
    within_host,
)
from slideformer.errors import BadInput
from slideformer.memory import Budget, Limit, size
from slideformer.memory.disk import no_room
from slideformer.memory.disk_look import DiskLook, look_at
from slideformer.model.decoder import Decoder
from slideformer.schedule import StepOptions, Timeline, build_step, prove, simulate, three_digits
from slideformer.schedule.collector import collector_put_off
from slideformer.train.disk_use import filled_nbytes, require_writes_left
from slideformer.train.setup import build_decoder, device_kind, engine_options, require_gds
from slideformer.train.verdict import verdict

JOINED_RUNS = 3  # the second of three steps has one before and one after it, as most steps have
TEXT_WIDTH = 80
WIDTH = 64  # of the picture, so that its lines fit in 80 columns


@dataclass(frozen=True)
class RunPlan:
    """A planned and proven run. timeline: of JOINED_RUNS full batches at `rates`. traffic: bytes of a step from disk
    and to it. look: at the disk that they are of; None where nothing lies on one. clipped_s: of a clipped step, where
    it is another than `step_s`. elsewhere: it is for another machine: of the host only max_host_memory counts, where
    it is given, and a disk need not be here."""

    config: TrainConfig
    device_kind: str
    decoder: Decoder
    options: EngineOptions
    budget: Budget
    rates: Rates
    costs: Costs | None
    timeline: Timeline
    traffic: tuple[int, int]
    look: DiskLook | None
    clipped_s: float | None = None
    elsewhere: bool = False

    @property
    def step_s(self) -> float:
        """By the timeline, and no faster than the disk moves what there is to move."""
        return max(self.timeline.step_s(), sum(self.traffic) / self.rates.disk_nbytes)

    @property
    def tokens_per_step(self) -> int:
        """Of a full batch."""
        return self.config.rows_per_step * self.config.max_length

    def require_fit(self) -> None:
        """Raise DoesNotFit if it needs more than there is or may be used, on the disk too, and BadInput where a run
        could not have its folder there or may not write enough. Warns, as a run does, of what only a GPU has."""
        decoder = self.decoder
        if self.device_kind == "cpu":
            warn_of_no_gpu(engine_options(self.config))
        require_fit(
            decoder.layout,
            self.options,
            hidden_size=decoder.hidden_size,
            dtype=decoder.dtype,
            device_kind=self.device_kind,
            costs=self.costs,
            found=self.budget,
            elsewhere=self.elsewhere and self.options.max_host_memory is not None,
        )
        filled = filled_nbytes(decoder.layout, self._chosen(), decoder.dtype, goes_on=False)
        require_writes_left(self.config, filled, self.traffic[1])
        look = self.look
        if look is None or (self.elsewhere and (look.is_guess or not look.here)):
            return
        if look.refusal is not None:
            raise BadInput(look.refusal)
        if self.budget.disk_nbytes > look.nbytes:
            raise no_room(look.path, self.budget.disk_nbytes, look.nbytes)

    def as_dict(self) -> dict[str, object]:
        """For --json. Bytes and seconds."""
        layout = self.decoder.layout
        step_s = self.step_s
        return {
            "parameters": layout.numel,
            "trained_parameters": layout.train_numel,
            "blocks": len(layout.blocks),
            "device_kind": self.device_kind,
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "update": self.options.update,
            "micro_batch_size": self.options.micro_batch_size,
            "window": self.options.slots,
            "slot_share": self._slot_share(),
            "device_nbytes": self.budget.device_nbytes,
            "host_nbytes": self.budget.host_nbytes,
            "device": self.budget.device,
            "host": self.budget.host,
            "disk_nbytes": self.budget.disk_nbytes,
            "disk": self.budget.disk,
            "disk_free_nbytes": self.look.nbytes if self.look is not None and self.look.here else None,
            "disk_direct": None if self.look is None else self.look.direct,
            "disk_reads_per_step": self.traffic[0],
            "disk_writes_per_step": self.traffic[1],
            "disk_ring": self.options.ring_places if self.budget.disk else None,
            "disk_writes": self._writes()[1],
            "disk_endurance_share": self._endurance(),
            "rates": asdict(self.rates),
            "placement": self.placement(),
            "step_time": step_s,
            "clipped_step_time": self.clipped_s or step_s,
            "tokens_per_second": self.tokens_per_step / step_s,
            "busy": self.busy(),
        }

    def placement(self) -> dict[str, object]:
        """What is on the device beside the window. Units and blocks by name."""
        names = [unit.name for unit in self.decoder.layout.units]
        chosen = self._chosen()
        return {
            "resident": [names[u] for u in chosen.resident],
            "keep": [names[u] for u in chosen.keep],
            "late": [names[u] for u in chosen.late],
            "hidden_states": chosen.hidden_pool,
            "sliced_head": chosen.sliced_head,
        }

    def busy(self) -> dict[str, float]:
        """Share of a step that each lane works, once steps join."""
        total = self.timeline.worked_s()
        length = JOINED_RUNS * self.step_s
        busy = {lane: min(seconds / length, 1.0) for lane, seconds in total.items() if seconds}
        if sum(self.traffic):
            busy["disk"] = min(sum(self.traffic) / self.rates.disk_nbytes / self.step_s, 1.0)
        return busy

    def _writes(self) -> tuple[int, int | None]:
        """Steps, and bytes that they write to disk; of 1,000 steps where the run's length hangs on its data. None:
        nothing is on disk."""
        steps = self.config.max_steps if self.config.max_steps > 0 else 1000
        return steps, steps * self.traffic[1] if self.traffic[1] else None

    def _endurance(self) -> float | None:
        """Share of the disk's rated endurance, where it is known."""
        written = self._writes()[1]
        return None if written is None or not self.config.disk_tbw else written / (self.config.disk_tbw * 1e12)

    def _disk_lines(self) -> list[str]:
        steps, written = self._writes()
        if not self.budget.disk:
            return []
        lines = ["", *_table("disk", self.budget.disk)]
        read, out = (nbytes / 1e9 for nbytes in self.traffic)
        share = self._endurance()
        told = "" if share is None else f", {share:.2%} of the {self.config.disk_tbw:g} TB that the disk is rated for"
        all_tb = three_digits((written or 0) / 1e12)
        text = f"a step reads {three_digits(read)} GB from disk and writes {three_digits(out)} GB; {steps:,} steps "
        text += f"write {all_tb} TB{told}; rings of {self.options.ring_places} tiles between disk and host"
        return [*lines, *textwrap.wrap(text, TEXT_WIDTH), *textwrap.wrap(self._looked(), TEXT_WIDTH)]

    def _looked(self) -> str:
        look = self.look
        if look is None or not look.here:
            return f"offload_dir {self.config.offload_dir} is not on this machine: its room is not known"
        way = {True: ", with direct I/O", False: "; no direct I/O: takes page cache too", None: ""}[look.direct]
        where = f"in /, where offload_dir {look.path} would be made" if look.is_guess else f"at offload_dir {look.path}"
        return f"{look.nbytes / 2**30:,.0f} GiB are free {where}{way}"

    def text(self) -> str:
        """For people, within 80 columns."""
        layout, config = self.decoder.layout, self.config
        step_s, rates = self.step_s, self.rates
        clipped = "" if self.clipped_s is None else f" ({three_digits(self.clipped_s)} s when clipped)"
        lines = [
            f"{layout.numel / 1e6:,.1f} M parameters, {layout.train_numel / 1e6:,.1f} M of them trained, "
            f"{len(layout.blocks)} blocks",
            *textwrap.wrap(
                f"{self.device_kind}, {str(self.decoder.dtype).removeprefix('torch.')}, {self.options.update} updates, "
                f"{self._window()}: {self._slot_share():.1%} of the weights",
                TEXT_WIDTH,
            ),
            *textwrap.wrap(f"on the device: {self._placed()}", TEXT_WIDTH),
            "",
            *_table("device", self.budget.device),
            "",
            *_table("host", self.budget.host),
            *self._disk_lines(),
            "",
            *textwrap.wrap(
                f"a step of {config.per_device_train_batch_size} x {config.gradient_accumulation_steps} sequences of "
                f"{config.max_length} tokens{self._parts()}: {three_digits(step_s)} s{clipped}, "
                f"{self.tokens_per_step / step_s:,.0f} tokens/s,",
                TEXT_WIDTH,
            ),
            f"expected at {rates.flops / 1e12:.3g} TFLOP/s, {rates.link_nbytes / 1e9:.3g} GB/s each way, "
            f"{rates.update_numel / 1e9:.3g} G parameters/s updated"
            + (f", disk {rates.disk_nbytes / 1e9:.3g} GB/s" if self.budget.disk else ""),
            *textwrap.wrap(verdict(self.busy(), step_s, None), TEXT_WIDTH),
            "",
            self.timeline.text(width=WIDTH, run=1),
        ]
        if self.device_kind == "cuda":
            lines += [
                "",
                "A run measures its machine first and may place more or less on the device;",
                "without max_gpu_memory nothing is placed here. Spare host memory, that of",
                "max_host_memory or else of this machine, is used for updates ahead of clipping.",
            ]
        return "\n".join(lines)

    def _chosen(self) -> StepOptions:
        return self.options.step_options(self.decoder.layout, self.decoder.dtype)

    def _placed(self) -> str:
        return placed(self.decoder.layout, self._chosen())

    def _parts(self) -> str:
        """auto_find_batch_size: how many rows are taken together, if fewer than the config says."""
        rows = self.options.micro_batch_size
        given = max(self.config.per_device_train_batch_size, self.config.eval_batch_size)
        return f", {rows} at a time" if rows < given else ""

    def _slot_share(self) -> float:
        """Blocks' slots as a share of all weights."""
        layout = self.decoder.layout
        return self._num_slots() * largest_block_numel(layout) / layout.numel

    def _window(self) -> str:
        num = self._num_slots()
        chosen = self.config.window == "auto" and self.options.slots == num == 1
        alone = ", since two have no room" if chosen else ""
        return f"window of {num} {'block' if num == 1 else 'blocks'}{alone}"

    def _num_slots(self) -> int:
        """Resident blocks need none."""
        layout = self.decoder.layout
        resident = self._chosen().resident
        return min(self.options.slots, len(set(layout.blocks) - set(resident)))


@dataclass(frozen=True, slots=True)
class _For:
    """The machine that is planned for. kind: of its device. host_nbytes: what the host may give, and spare_nbytes: what
    with updates ahead it may."""

    kind: str
    rates: Rates
    host_nbytes: int
    spare_nbytes: int


@collector_put_off()
def plan_run(
    config: TrainConfig,
    *,
    elsewhere: bool = False,
    flops: float | None = None,
    link_nbytes: float | None = None,
    update_numel: float | None = None,
    disk_nbytes: float | None = None,
) -> RunPlan:
    """Plan, prove and simulate a config. Reads the model's config.json only.

    elsewhere: for a machine whose host has max_host_memory, where that is given; else all that is decided by the host's
    memory is what a run decides here. flops, link_nbytes, update_numel, disk_nbytes: rates of the machine, where they
    are known. Raises BadInput.
    """
    kind, limit = device_kind(config), config.max_host_memory
    require_gds(config, kind, elsewhere=True)
    decoder = build_decoder(config, kind, torch.device("cpu"))
    rates = ASSUMED[kind].known(
        flops=flops, link_nbytes=link_nbytes, update_numel=update_numel, disk_nbytes=disk_nbytes
    )
    if elsewhere and limit is not None:
        machine = _For(kind, rates, limit, limit)
    else:
        machine = _For(kind, rates, host_room(limit).nbytes, spare_room(limit))
    given = engine_options(config)
    options, costs, budgets = first = _sized(given, decoder, machine)
    while given.find_micro_batch and not _fits(options, budgets, machine):
        if (smaller := halved(given)) is None:
            options, costs, budgets = first  # which is what does not fit
            break
        given = smaller
        options, costs, budgets = _sized(given, decoder, machine)
    options = _with_ahead(options, decoder, costs, budgets, machine)
    options = deepened(options, decoder, kind, costs, budgets, machine.host_nbytes)
    shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
    beside = costs if kind == "cuda" else None
    step_options = options.step_options(decoder.layout, decoder.dtype)
    plan = build_step(decoder.layout, step_options, ops=budgets.step_ops(options))
    prove(plan, decoder.layout, step_options)
    timeline = simulate(plan, cost_of(decoder.layout, shape, costs), runs=JOINED_RUNS)
    traffic = disk_traffic(plan, decoder.layout, shape)
    found, look = budgets.of(options), None
    if found.disk and config.offload_dir is not None:
        look = look_at(Path(config.offload_dir), reuse=config.reuse_offload_dir)
    may_clip = options.ahead and config.max_grad_norm > 0
    clipped_s = predicted_s(plan, decoder.layout, shape, costs, clipped=True) if may_clip else None
    return RunPlan(config, kind, decoder, options, found, rates, beside, timeline, traffic, look, clipped_s, elsewhere)


def _sized(options: EngineOptions, decoder: Decoder, machine: _For) -> tuple[EngineOptions, Costs, Budgets]:
    """With micro-batches of the size that is given."""
    costs = assumed(
        decoder.layout, options.batch_shape(decoder.hidden_size, decoder.dtype), machine.rates, kind=machine.kind
    )
    budgets = budgets_of(decoder, costs if machine.kind == "cuda" else None)
    return _settled(options, decoder, costs, budgets, machine), costs, budgets


def _fits(options: EngineOptions, budgets: Budgets, machine: _For) -> bool:
    found, gpu = budgets.of(options), options.max_gpu_memory
    device = None if gpu is None or machine.kind == "cpu" else Limit(gpu, "max_gpu_memory")
    placed = found.on_one_tier() if machine.kind == "cpu" else found
    return placed.fits(device, Limit(machine.host_nbytes, "host memory"))


def _settled(options: EngineOptions, decoder: Decoder, costs: Costs, budgets: Budgets, machine: _For) -> EngineOptions:
    """What the engine decides by the room there is, but for updates ahead and, after those, the depth of rings. The
    device is what max_gpu_memory says: none is asked here."""
    if machine.kind == "cpu":
        return within_host(streamed(options, decoder), decoder, budgets, machine.host_nbytes)
    placed = unplaced(options, decoder)
    if options.max_gpu_memory is not None:
        placed = place(_room(options, decoder, costs, budgets, machine))
    return with_disk(placed, decoder, machine.kind, budgets, machine.host_nbytes)


def _room(options: EngineOptions, decoder: Decoder, costs: Costs, budgets: Budgets, machine: _For) -> Room:
    gpu, spare = options.max_gpu_memory or 0, machine.spare_nbytes
    return Room(decoder.layout, options, costs, decoder.hidden_size, decoder.dtype, gpu, budgets, spare)


def _with_ahead(
    options: EngineOptions, decoder: Decoder, costs: Costs, budgets: Budgets, machine: _For
) -> EngineOptions:
    """With updates ahead in what the host has to spare."""
    if options.ahead != "auto":
        return options
    step_s = _room(options, decoder, costs, budgets, machine).step_s
    spare_nbytes = machine.spare_nbytes - budgets.of(options).host_nbytes
    return replace(options, ahead=fastest_ahead(decoder.layout, options, spare_nbytes, costs, step_s))


def _table(tier: str, terms: dict[str, int]) -> list[str]:
    """A tier's total, and its terms, largest first."""
    ordered = sorted(terms.items(), key=lambda pair: -pair[1])
    rows = [f"  {term:<28} {size(nbytes):>12}" for term, nbytes in ordered if nbytes]
    return [f"{tier:<30} {size(sum(terms.values())):>12}", *rows]
