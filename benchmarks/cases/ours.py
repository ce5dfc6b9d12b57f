"""SlideFormer's engine: weights and optimizer state streamed, resident, or placed automatically.

The door to the engine is `options_of` (what it is built with), `_planned` (bytes that its plan says) and the attributes
of a step's result. Steps are submitted one ahead and read one late, as the trainer does.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from cases import NotHere, Settings
from lanes import Sizes, dram_gbps, parts_s
from lines import GIB, host_kinds_gib, host_peak_gib, spread
from pool import fill
from shapes import random_tokens, shape
from slideformer.data.batches import MicroBatch
from slideformer.device import Device, open_device
from slideformer.engine import Engine, EngineOptions, Offload, StepResult, budget_of
from slideformer.engine.costs import disk_traffic
from slideformer.engine.options import CONTENTS
from slideformer.layout import Layout
from slideformer.model.decoder import Decoder
from slideformer.schedule import OpKind, Timeline
from slideformer.schedule.ops import DISK_LANES
from traffic import copies, our_updates

DEFAULTS: dict[str, object] = {"grad_slots": 2, "ring": 8}
LR = 1e-5
LOOKED_AT = 3
"""Steps whose lanes are read, the last ones."""
EVERY = 1 << 30
"""More than there are."""


def options_of(settings: Settings, layout: Layout) -> EngineOptions:
    """Raises NotHere for a placement that this engine does not know."""
    known = {field.name for field in dataclasses.fields(EngineOptions)}
    chosen: dict[str, object] = {}
    if settings.case == "ours-resident":
        chosen = {"resident": tuple(range(len(layout.units)))}
    elif settings.case == "ours-auto":
        chosen = {"resident": "auto", "keep": "auto"}
    if missing := chosen.keys() - known:
        raise NotHere(f"this engine has no option {', '.join(missing)}, so {settings.case} cannot be run")
    if unknown := settings.engine.keys() - known:
        raise SystemExit(f"--engine: no option {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    given = {
        "micro_batch_size": settings.batch // settings.micro_batches,
        "micro_batches": settings.micro_batches,
        "max_length": settings.seq,
        "window": settings.window,
        "update": settings.update,
        "max_grad_norm": settings.max_grad_norm,
        "cpu_threads": settings.cpu_threads,
    }
    if settings.offload:
        chosen |= {**_offloaded(settings.offload, layout), "offload_dir": settings.offload_dir}
    return EngineOptions(**(DEFAULTS | given | chosen | settings.engine))


def _offloaded(shares: dict[str, float], layout: Layout) -> dict[str, object]:
    """Raises SystemExit for a share of the activations beside whole blocks that is neither none nor all."""
    optimizer, weights, saved = (shares.get(name, 0.0) for name in ("optimizer", "weights", "activations"))
    if "blocks" not in shares:
        return {"offload": Offload(optimizer, weights, saved)}
    if saved not in (0, 1):
        raise SystemExit(f"--offload: activations is {saved:g} beside blocks, must be 0 or 1")
    num = round(shares["blocks"] * len(layout.blocks))
    blocks = [layout.blocks[i * len(layout.blocks) // num] for i in range(num)]  # spread over the model
    pairs = tuple((content, unit) for content in CONTENTS for unit in blocks)
    return {"disk": pairs, "saved_on_disk": EVERY if saved else 0}


def measure(settings: Settings) -> dict[str, object]:
    config = shape(settings.shape, num_layers=settings.num_layers)
    with open_device(settings.device) as device:
        cuda = device.kind == "cuda"
        if cuda and settings.gpu_limit_gib:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(settings.gpu_limit_gib * GIB / total)
        _a_product(device)
        before = {"host_before_gib": host_peak_gib(), "context_gib": round(device_used() / GIB, 3)}
        before["host_before_kinds_gib"] = host_kinds_gib()
        kernels, *without = settings.kernels.split("-")
        decoder = Decoder(
            config,
            dtype=torch.bfloat16 if cuda else torch.float32,
            tile_numel=settings.tile_numel,
            kernels=kernels,
            without_kernels=tuple(without),
            device=device.torch_device,
        )
        options = options_of(settings, decoder.layout)
        began, cached = time.perf_counter(), page_cache_nbytes()
        with Engine(decoder, device, options) as engine:
            fill(engine)
            if cuda:  # random weights were drawn on the device
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            ready_s = round(time.perf_counter() - began, 1)
            measured = _steps(engine, device, settings)
            measured |= _beside(engine, settings, page_cache_nbytes() - cached)
        return {**measured, **before, "kernels": decoder.kernels, "ready_s": ready_s}


def _a_product(device: Device) -> None:
    """The context and the matrix library are not ours to count, on the host; what that keeps on the device is."""
    square = torch.zeros(512, 512, device=device.torch_device)
    (square @ square).sum().item()
    device.release_libraries()


def _beside(engine: Engine, settings: Settings, cached_nbytes: int) -> dict[str, object]:
    """What a run on disk says of how it moves there, and what a plan with more layers takes on the device."""
    found: dict[str, object] = {}
    if engine.folder is not None:
        found |= {"direct": engine.folder.direct, "page_cache_mib": round(cached_nbytes / 2**20, 1)}
    if settings.plan_layers is not None:
        found |= {"plan_layers": settings.plan_layers, "plan_layers_gib": _device_gib(engine, settings)}
    return found


def _device_gib(engine: Engine, settings: Settings) -> float:
    """GiB on the device by the plan of the shape with plan_layers, with this engine's options and what it measured of
    a block."""
    decoder, costs = engine.decoder, engine.costs
    config = shape(settings.shape, num_layers=settings.plan_layers)
    kernels, *without = settings.kernels.split("-")
    larger = Decoder(
        config,
        dtype=decoder.dtype,
        tile_numel=settings.tile_numel,
        kernels=kernels,
        without_kernels=tuple(without),
        device=engine.device.torch_device,
    )
    if costs is not None:
        costs = dataclasses.replace(costs, blocks=costs.blocks[:1] * len(larger.layout.blocks))
    options = dataclasses.replace(engine.options, disk=(), saved_on_disk=0, ahead=())
    planned = budget_of(larger.layout, options, hidden_size=larger.hidden_size, dtype=larger.dtype, costs=costs)
    return round(planned.device_nbytes / GIB, 3)


def page_cache_nbytes() -> int:
    """Of the machine: what is mapped and shared is counted there, and is not of files."""
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * (int(found["Cached"].split()[0]) - int(found["Shmem"].split()[0]))


def _steps(engine: Engine, device: Device, settings: Settings) -> dict[str, object]:
    batches = [_batch(engine, settings, index) for index in range(settings.warmup + settings.steps + 1)]
    results: list[StepResult] = []
    times: list[float] = []
    marks: list[dict[str, int]] = []
    losses: list[float] = []
    norms: list[float] = []

    def finish(result: StepResult) -> None:
        losses.append(result.loss)
        norms.append(result.grad_norm)
        result.wait()
        times.append(time.perf_counter())
        marks.append(_marks(engine, device))

    for index, batch in enumerate(batches[:-1]):
        results = [*results[-LOOKED_AT:], engine.step(batch, lr=LR)]
        if index:  # the step before: its results are read while this one is queued behind it
            finish(results[-2])
    finish(results[-1])
    took = [b - a for a, b in zip(times, times[1:], strict=False)][settings.warmup - 1 :]
    if settings.trace:
        _write_trace(settings, results[-LOOKED_AT:])
    sizes = _sizes(engine, batches[-1])
    timelines = [result.timeline() for result in results[-LOOKED_AT:]]
    engine.synchronize()
    disk_before = engine.disk_traffic
    memory = _memory(engine, device)  # before a step is counted: reading the driver's record takes host memory
    with copies(cuda=device.kind == "cuda") as traffic, our_updates(engine.kernels) as count:
        engine.step(batches[-1], lr=LR).wait()
        engine.synchronize()
    return {
        "loss": [round(loss, 5) for loss in losses],
        "grad_norm": [round(norm, 4) for norm in norms],
        "step_s": spread(took),
        "busy": _busy(results, times),
        "parts_s": parts_s(timelines, sizes),
        "dram_gbps": dram_gbps(timelines, sizes),
        "bytes": {"up": traffic.up, "down": traffic.down},
        "plan_bytes": _planned(engine, sizes),
        "disk_bytes": [now - then for now, then in zip(engine.disk_traffic, disk_before, strict=True)],
        "plan_disk_bytes": list(_planned_on_disk(engine)),
        "params_updated": count.numel,
        "predicted_step_s": getattr(engine, "predicted_step_s", None),
        **memory,
        "micro_batches": engine.options.micro_batches,
        "cpu_threads": engine.kernels.threads,
        "isa": engine.kernels.isa,
        "options": {k: v for k, v in dataclasses.asdict(engine.options).items() if k not in ("ahead", "disk")},
        "ahead_units": len(engine.step_options.ahead),
        "num_ops": len(engine.plan.ops),
        "steady": _range(marks[2:] or marks),
    }


def _busy(results: list[StepResult], times: list[float]) -> dict[str, float]:
    """Share of the time of the last LOOKED_AT steps, or as many as there are, that each lane worked. results: one more,
    if there was one; times: ends of all steps. A lane that began those steps well before the end of the one before them
    took as long as it was at them. The disk's lanes work for two steps at once, also for one that began before: they
    are looked at between two moments."""
    num = min(LOOKED_AT, len(results), len(times) - 1)
    start_s, end_s = times[-1 - num], times[-1]
    spans = [span for result in results[-num:] for span in result.timeline().spans if span.op.lane not in DISK_LANES]
    shares = {}
    for lane, worked_s in Timeline(tuple(spans)).worked_s().items():
        own = [span for span in spans if str(span.op.lane) == lane]
        at_it_s = max(span.end_s for span in own) - min(span.start_s for span in own)
        shares[lane] = worked_s / max(end_s - start_s, at_it_s)
    disk = [
        span._replace(start_s=min(max(span.start_s, start_s), end_s), end_s=min(max(span.end_s, start_s), end_s))
        for result in results
        for span in result.timeline().spans
        if span.op.lane in DISK_LANES
    ]
    shares |= {lane: worked_s / (end_s - start_s) for lane, worked_s in Timeline(tuple(disk)).worked_s().items()}
    return {lane: round(share, 3) for lane, share in shares.items()}


def _batch(engine: Engine, settings: Settings, index: int) -> list[MicroBatch]:
    tokens = random_tokens(index, settings.batch, settings.seq, engine.decoder.vocab_size)
    return [MicroBatch(part, part) for part in tokens.split(settings.batch // settings.micro_batches)]


def _memory(engine: Engine, device: Device) -> dict[str, object]:
    reserved = torch.cuda.max_memory_reserved() if device.kind == "cuda" else 0
    return {
        "gpu_peak_gib": round(device.peak_nbytes() / GIB, 3),
        "gpu_reserved_gib": round(reserved / GIB, 3),
        "host_peak_gib": host_peak_gib(),
        "host_kinds_gib": host_kinds_gib(),
        "pinned_gib": round(device.page_locked_nbytes / GIB, 3),
        "saved_gib": round(engine.budget.host.get("saved inputs", 0) / GIB, 3),
        "disk_gib": round(engine.budget.disk_nbytes / GIB, 3),
        "plan_gib": {tier: round(nbytes / GIB, 3) for tier, nbytes in engine.memory().items()},
    }


def _sizes(engine: Engine, batch: list[MicroBatch]) -> Sizes:
    itemsize, width = engine.decoder.dtype.itemsize, engine.decoder.hidden_size
    rows = torch.cat([micro.input_ids.flatten() for micro in batch]).unique().numel()
    tokens = engine.options.micro_batch_size * engine.options.max_length  # the engine may take them apart once more
    return Sizes(engine.layout, itemsize, rows, tokens * width * itemsize)


def _planned(engine: Engine, sizes: Sizes) -> dict[str, int]:
    """Bytes that the ops of a step move over the link, by the layout. Words of a few bytes (norms, the loss) and the
    token ids are left out."""
    up = (OpKind.UPLOAD, OpKind.UPLOAD_ROWS, OpKind.FETCH)
    moved = [(op.kind in up, sizes.copied_nbytes(op)) for op in engine.plan.ops]
    return {"up": sum(n for is_up, n in moved if is_up), "down": sum(n for is_up, n in moved if not is_up)}


def _planned_on_disk(engine: Engine) -> tuple[int, int]:
    """Bytes that a full step reads from disk and writes to it, by the layout."""
    shape = engine.options.batch_shape(engine.decoder.hidden_size, engine.decoder.dtype)
    return disk_traffic(engine.plan, engine.layout, shape)


def _marks(engine: Engine, device: Device) -> dict[str, int]:
    """What must not change from step to step; the line has the least and the most of steps 3 to the last."""
    status = Path("/proc/self/status").read_text().splitlines()
    rss = next(int(text.split()[1]) for text in status if text.startswith("VmRSS"))
    tensors = (held for held in engine.executor.buffers.values() if isinstance(held, torch.Tensor))
    marks = {
        "pinned": device.page_locked_nbytes,
        "rss_mib": rss // 1024,
        "slots": hash(tuple(tensor.data_ptr() for tensor in tensors)),
    }
    if device.kind == "cuda":
        stats = torch.cuda.memory_stats()
        marks["segments"] = stats["segment.all.current"]
        marks["reserved"] = stats["reserved_bytes.all.current"]
        marks["device_used"] = device_used()
    return marks


def device_used() -> int:
    """Bytes of the GPU that are not free, whoever has them."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _range(marks: list[dict[str, int]]) -> dict[str, list[int]]:
    return {key: [min(mark[key] for mark in marks), max(mark[key] for mark in marks)] for key in marks[0]}


def _write_trace(settings: Settings, results: list[StepResult]) -> None:
    folder = Path(str(settings.trace))
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{settings.shape}-b{settings.batch}-{settings.case}-{settings.update}"
    timelines = [result.timeline() for result in results]
    (folder / f"{name}.json").write_text(timelines[1].chrome_trace())
    text = timelines[1].text(width=150)
    uploads = [s.start_s for s in timelines[2].spans if s.op.kind == "upload"]
    if uploads:
        ahead = max(s.end_s for s in timelines[1].spans if s.op.lane == "update") - min(uploads)
        text += f"\nnext step's first upload starts {ahead:.4f} s before this step's last update ends\n"
    (folder / f"{name}.txt").write_text(text)
    print(text, flush=True)
