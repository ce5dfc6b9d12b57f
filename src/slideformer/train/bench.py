"""A few training steps of a config, timed: its model with random weights on random tokens.

Everything else is the config's own: placement, update program, batch, limits. Reads the model's config.json and nothing
else; what lies in offload_dir meanwhile is removed at the end.
"""

from __future__ import annotations

import os
import resource
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType

import torch

from slideformer.config import TrainConfig
from slideformer.data.batches import MicroBatch
from slideformer.device import Device, LaneFailure, open_device
from slideformer.engine import Engine, NonFinite, StepResult
from slideformer.engine.placement import placed
from slideformer.errors import BadInput, RunFailed
from slideformer.memory import resident_nbytes, size
from slideformer.model.decoder import Decoder
from slideformer.model.folder import read_config
from slideformer.model.parity import check_parity
from slideformer.train.disk_use import DiskUse
from slideformer.train.loop import flops_per_token
from slideformer.train.peak import peak_tflops
from slideformer.train.plan import TEXT_WIDTH, plan_run
from slideformer.train.setup import build_decoder, device_kind, engine_options, require_gds
from slideformer.train.stop import Stopped, StopRequests, let_go
from slideformer.train.verdict import verdict

WARMUP_STEPS = 2
BUSY_STEPS = 3
"""Of the last steps the lanes' work is added up; it keeps the marks of all their ops alive."""

PIECE_NUMEL = 1 << 22
WEIGHT_STD = 0.02
LABEL_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Tier:
    """Bytes by the plan, and as found: the most that was allocated on the device; what this process has grown by on
    the host since before the engine was built; what the files take on disk."""

    planned_nbytes: int
    measured_nbytes: int


@dataclass(frozen=True, slots=True)
class Timed:
    """step_s: of each step, from the end of the one before to its own. busy: share of the last ones that each lane
    worked. disk: GB/s in the timed steps; empty where nothing is on disk."""

    step_s: tuple[float, ...]
    busy: Mapping[str, float]
    disk: Mapping[str, float]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """What was found. predicted_s: of a step, by rates measured here, or by those assumed of such a machine where
    `assumed`; clipped_s: of a clipped one, where that may come. peak_tflops: of the device, where one is known."""

    config: TrainConfig
    device_kind: str
    dtype: torch.dtype
    numel: int
    train_numel: int
    on_device: str
    update_threads: int
    timed: Timed
    predicted_s: float
    clipped_s: float | None
    assumed: bool
    flops_per_token: float
    peak_tflops: float | None
    memory: Mapping[str, Tier]
    page_locked_nbytes: int
    disk_ring: int

    @property
    def step_s(self) -> float:
        return median(self.timed.step_s)

    @property
    def tokens_per_second(self) -> float:
        return self.config.rows_per_step * self.config.max_length / self.step_s

    @property
    def tflops(self) -> float:
        """As in metrics.jsonl: without attention's own products."""
        return self.flops_per_token * self.tokens_per_second / 1e12

    @property
    def binds(self) -> str:
        return verdict(self.timed.busy, self.step_s, None if self.assumed else self.predicted_s, self.clipped_s)

    def as_dict(self) -> dict[str, object]:
        """For --json. Names are those of metrics.jsonl where it has them."""
        config = self.config
        return {
            "parameters": self.numel,
            "trained_parameters": self.train_numel,
            "device_kind": self.device_kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "update": config.update_program,
            "update_threads": self.update_threads,
            "on_device": self.on_device,
            "per_device_train_batch_size": config.per_device_train_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "max_length": config.max_length,
            "steps": len(self.timed.step_s),
            "warmup_steps": WARMUP_STEPS,
            "losses": list(self.timed.losses),
            "step_time": self.step_s,
            "step_time_min": min(self.timed.step_s),
            "step_time_max": max(self.timed.step_s),
            "predicted_step_time": self.predicted_s,
            **({} if self.clipped_s is None else {"predicted_clipped_step_time": self.clipped_s}),
            "predicted_by": "assumed rates" if self.assumed else "measured rates",
            "tokens_per_second": self.tokens_per_second,
            "tflops": self.tflops,
            **({} if self.peak_tflops is None else {"mfu": self.tflops / self.peak_tflops}),
            "memory": {
                tier: {"planned_nbytes": found.planned_nbytes, "measured_nbytes": found.measured_nbytes}
                for tier, found in self.memory.items()
            },
            "host_mem_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "pinned_gib": self.page_locked_nbytes / 2**30,
            **self.timed.disk,
            **({"disk_ring": self.disk_ring} if self.timed.disk else {}),
            "busy": dict(self.timed.busy),
            "binds": self.binds,
        }

    def text(self) -> str:
        """For people, within 80 columns."""
        config, times = self.config, self.timed.step_s
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.tflops:.3g} TFLOP/s"
        if self.peak_tflops is not None:
            speed += f", mfu {self.tflops / self.peak_tflops:.1%}"
        clipped = "" if self.clipped_s is None else f" ({self.clipped_s:.4g} s when clipped)"
        by = "at rates assumed of such a machine" if self.assumed else "by what was measured here before the first step"
        rows = [
            (
                "model",
                f"{self.numel / 1e6:,.1f} M parameters, {self.train_numel / 1e6:,.1f} M of them trained, random; "
                + f"{self.device_kind}, {str(self.dtype).removeprefix('torch.')}, {config.update_program} updates "
                + f"with {self.update_threads} threads",
            ),
            ("on the device", self.on_device),
            (
                "batch",
                f"{config.per_device_train_batch_size} x {config.gradient_accumulation_steps} sequences of "
                + f"{config.max_length} tokens",
            ),
            (
                "step",
                f"{self.step_s:.4g} s median, {min(times):.4g} to {max(times):.4g} s over {len(times)} steps, "
                + f"after {WARMUP_STEPS} of warm-up",
            ),
            ("predicted", f"{self.predicted_s:.4g} s{clipped}, {by}"),
            ("speed", speed),
            *((tier, _of_tier(tier, found)) for tier, found in self.memory.items()),
            ("lanes", ", ".join(f"{lane} {share:.0%}" for lane, share in _largest_first(self.timed.busy))),
        ]
        if self.timed.disk:
            read, written = self.timed.disk["nvme_read_gbps"], self.timed.disk["nvme_write_gbps"]
            rings = f"rings of {self.disk_ring} tiles between disk and host"
            rows.append(("disk moved", f"{read:.3g} GB/s read, {written:.3g} GB/s written; {rings}"))
        indent = " " * (LABEL_WIDTH + 2)
        lines = [
            textwrap.fill(text, TEXT_WIDTH, initial_indent=f"{name:<{LABEL_WIDTH + 2}}", subsequent_indent=indent)
            for name, text in rows
        ]
        return "\n".join([*lines, "", *textwrap.wrap(self.binds, TEXT_WIDTH)])


def run_bench(config: TrainConfig, *, steps: int, told: Callable[[str], None] = lambda _: None) -> Bench:
    """Train WARMUP_STEPS and then `steps` steps. told: hears what takes its time.

    Raises BadInput and DoesNotFit before anything of the model's size is allocated, RunFailed afterwards, and Stopped
    when a signal asked for the end.
    """
    config = config.model_copy(update={"keep_offload_dir": False})
    require_gds(config, device_kind(config))
    model_config = read_config(Path(config.model_name_or_path))
    check_parity(model_config, attn_implementation=config.attn_implementation, disable_dropout=config.disable_dropout)
    with StopRequests() as stop, ExitStack() as closing:
        held = ExitStack()
        closing.push(partial(let_go, held))
        device = held.enter_context(open_device(config.device))
        closing.push(partial(_drop_queued, device))
        decoder = build_decoder(config, device.kind, device.torch_device, model_config)
        _require_positions(config, decoder)
        assumed_s = plan_run(config).step_s if device.kind == "cpu" else None  # nothing is measured there
        peak = peak_tflops(device, decoder.dtype)
        before = resident_nbytes()
        engine = held.enter_context(Engine(decoder, device, engine_options(config)))
        told(f"drawing {engine.layout.numel / 1e6:,.1f} M parameters at random")
        _draw(engine, device, config.seed, stop)
        told(f"training {WARMUP_STEPS} + {steps} steps")
        timed = _train(engine, config, steps, stop)
        return Bench(
            config,
            device.kind,
            decoder.dtype,
            engine.layout.numel,
            engine.layout.train_numel,
            placed(engine.layout, engine.step_options),
            engine.kernels.threads,
            timed,
            predicted_s=engine.predicted_step_s or assumed_s or 0.0,
            clipped_s=engine.predicted_clipped_s,
            assumed=engine.predicted_step_s is None,
            flops_per_token=flops_per_token(engine.layout),
            peak_tflops=peak and peak[0],
            memory=_memory(engine, device, resident_nbytes() - before),
            page_locked_nbytes=device.page_locked_nbytes,
            disk_ring=engine.step_options.disk_ring,
        )


def _require_positions(config: TrainConfig, decoder: Decoder) -> None:
    if decoder.num_positions is not None and config.max_length > decoder.num_positions:
        raise BadInput(
            f"max_length is {config.max_length}, and the model's position table has {decoder.num_positions}: lower it, "
            "since every sequence is as long as that here"
        )


def _drop_queued(
    device: Device, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
) -> None:
    if isinstance(error, Stopped) and error.at_once:
        device.abandon(error)


def _draw(engine: Engine, device: Device, seed: int, stop: StopRequests) -> None:
    """Matrices are normal, vectors are one, or zero where they are biases. In pieces, drawn on the device: the model is
    nowhere as a whole but in the engine."""
    generator = torch.Generator(device=device.torch_device).manual_seed(seed)
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            offset = unit.offsets[param.name]
            for start in range(0, param.numel, PIECE_NUMEL):
                stop.raise_if_asked("before the first step")
                numel = min(PIECE_NUMEL, param.numel - start)
                if len(param.shape) > 1:
                    piece = torch.empty(numel, device=device.torch_device)
                    piece.normal_(0.0, WEIGHT_STD, generator=generator)
                else:
                    piece = torch.full((numel,), 0.0 if param.name.endswith("bias") else 1.0)
                engine.write(index, offset + start, piece.cpu())


def _train(engine: Engine, config: TrainConfig, steps: int, stop: StopRequests) -> Timed:
    """Every step is submitted before the result of the one before it is read, as in a run."""
    total = WARMUP_STEPS + steps
    generator = torch.Generator().manual_seed(config.seed)
    disk = DiskUse(engine, config.max_disk_writes)
    last: deque[StepResult] = deque(maxlen=min(BUSY_STEPS, steps))
    ends: list[float] = []
    losses: list[float] = []

    def finish(result: StepResult) -> None:
        losses.append(result.loss)
        result.wait()
        ends.append(time.perf_counter())
        last.append(result)
        if len(ends) == WARMUP_STEPS:
            disk.metrics()
        stop.raise_if_asked(f"after step {len(ends)} of {total}")

    waiting: StepResult | None = None
    try:
        for _ in range(total):
            if disk.is_spent:
                raise RunFailed(
                    f"after step {len(ends)} of {total}: {disk.sentence()}; give fewer --steps, or a larger limit"
                )
            submitted = engine.step(_tokens(config, engine.decoder, generator), lr=config.learning_rate)
            if waiting is not None:
                finish(waiting)
            waiting = submitted
        assert waiting is not None
        finish(waiting)
    except LaneFailure as error:
        raise _failure(error, len(ends) + 1) from error
    moved = disk.metrics()
    took = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))[WARMUP_STEPS - 1 :]
    worked: Counter[str] = Counter()
    for result in last:
        worked.update({str(lane): seconds for lane, seconds in result.busy_s().items() if seconds})
    length = ends[-1] - ends[-1 - len(last)]
    return Timed(took, {lane: min(s / length, 1.0) for lane, s in worked.items()}, moved, tuple(losses))


def _tokens(config: TrainConfig, decoder: Decoder, generator: torch.Generator) -> list[MicroBatch]:
    """A full batch of random tokens, every one of them a target."""
    shape = (config.per_device_train_batch_size, config.max_length)
    drawn = [
        torch.randint(decoder.vocab_size, shape, generator=generator) for _ in range(config.gradient_accumulation_steps)
    ]
    return [MicroBatch(ids, ids) for ids in drawn]


def _failure(error: LaneFailure, step: int) -> RunFailed:
    if isinstance(error.__cause__, NonFinite):
        return RunFailed(f"step {step}: {error.__cause__}. Lower learning_rate, or set on_nonfinite: skip")
    return RunFailed(f"step {step}: {error}")


def _memory(engine: Engine, device: Device, host_nbytes: int) -> dict[str, Tier]:
    """Of the tiers that there are: on the CPU the device's memory is the host's."""
    planned = engine.budget.on_one_tier() if device.kind == "cpu" else engine.budget
    found = {"host": Tier(planned.host_nbytes, host_nbytes)}
    if device.kind != "cpu":
        found = {"device": Tier(planned.device_nbytes, device.peak_nbytes()), **found}
    if engine.folder is not None:
        taken = sum(entry.stat().st_blocks * 512 for entry in os.scandir(engine.folder.path) if entry.is_file())
        found["disk"] = Tier(planned.disk_nbytes, taken)
    return found


def _of_tier(name: str, tier: Tier) -> str:
    how = {"device": "the most at once", "host": "growth of this process", "disk": "its files"}[name]
    return f"{size(tier.planned_nbytes)} planned, {size(tier.measured_nbytes)} measured ({how})"


def _largest_first(busy: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(busy.items(), key=lambda pair: -pair[1])
