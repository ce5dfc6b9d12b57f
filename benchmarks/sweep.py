"""Is the automatic placement right? Its step time and bytes against what it foretold, and against placements by hand.

    python benchmarks/sweep.py --only llama-3.2-1b@6 llama-3.2-1b@24 llama-3.2-3b@24 --batch 16 --out sweep.jsonl
    python benchmarks/sweep.py --report sweep.jsonl

SHAPE@LIMIT is a shape and the GiB of the GPU that may be used; 141 is all. Of the placements by hand, those that fit
are sorted by the planner's clock, and the first --manual are measured. Engines follow each other in one process, in the
order of --only, over the same host memory and from one measurement of the blocks (pool.py). One JSON line a placement.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lines import GIB, new_run, shared, spread, write
from pool import STATE_NBYTES, HostPool, fill, measured_once
from report import read
from rules import Line
from shapes import random_tokens, shape
from slideformer.data.batches import MicroBatch
from slideformer.device import open_device
from slideformer.engine import Engine, EngineOptions
from slideformer.engine.placement import Room, placed
from slideformer.errors import DoesNotFit
from slideformer.layout import Layout, UnitKind
from slideformer.model.decoder import Decoder
from step import num_params
from targets import Target

WHOLE_GIB = 141
LR = 1e-5
STEP_OFF, BYTES_OVER, AUTO_OVER = 0.10, 1.05, 1.03
AUTO = "auto"


def by_hand(layout: Layout, options: EngineOptions) -> dict[str, EngineOptions]:
    """Placements that somebody might choose."""
    nothing = replace(options, resident=(), keep=(), saved_on_device=0, late=())
    ends = tuple(u for u in range(len(layout.units)) if layout.units[u].kind is not UnitKind.BLOCK)
    found = {f"streamed, window {window}": replace(nothing, window=window) for window in (2, 3)}
    found["inputs stay"] = replace(nothing, saved_on_device=None)
    found["ends resident"] = replace(nothing, resident=ends)
    found["ends resident, inputs stay"] = replace(nothing, resident=ends, saved_on_device=None)
    half = layout.blocks[: len(layout.blocks) // 2]
    found["half resident, inputs stay"] = replace(nothing, resident=(*ends, *half), saved_on_device=None)
    everything = tuple(range(len(layout.units)))
    found["all resident"] = replace(nothing, resident=everything, saved_on_device=None)
    kept = layout.blocks[-(len(layout.blocks) // 2) :]
    found["all resident, half kept"] = replace(nothing, resident=everything, keep=kept, saved_on_device=None)
    found["all resident, all kept"] = replace(nothing, resident=everything, keep=tuple(layout.blocks))
    if options.update == "eager":
        for share in (4, 2):
            late = layout.blocks[options.slots :: share]
            found[f"inputs stay, every {share}th late"] = replace(nothing, saved_on_device=None, late=late)
    return found


def measure(name: str, limit: float, args: argparse.Namespace, pool: HostPool, common: Line) -> None:
    """The automatic placement, and then those by hand."""
    cuda = args.device != "cpu"
    config = _config(name, args)
    dtype = torch.bfloat16 if cuda else torch.float32
    decoder = Decoder(config, dtype=dtype, tile_numel=args.tile_numel, device=args.device)
    options = EngineOptions(
        micro_batch_size=args.batch,
        max_length=args.seq,
        window=2,
        ring=8,
        update="eager",
        max_grad_norm=0.0,
        resident="auto",
        keep="auto",
        max_gpu_memory=int(limit * GIB) if cuda and limit < WHOLE_GIB else None,
    )
    where = {"shape": name, "num_layers": config.num_hidden_layers, "batch": args.batch, "seq": args.seq}
    where |= {"update": "eager", "max_grad_norm": 0.0, "gpu_limit_gib": limit}
    trials = [(AUTO, options)]
    for case, chosen in trials:
        try:
            found, more = run(decoder, chosen, args, pool)
        except (DoesNotFit, torch.OutOfMemoryError) as error:
            print(f"does not fit: {name}@{limit:g} {case}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            write(common | where | {"case": case} | found, args.out)
            trials += more if case == AUTO else []
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def _config(name: str, args: argparse.Namespace) -> PretrainedConfig:
    return shape(name, num_layers=args.num_layers)


def run(
    decoder: Decoder, options: EngineOptions, args: argparse.Namespace, pool: HostPool
) -> tuple[Line, list[tuple[str, EngineOptions]]]:
    """What is measured of one placement, and which ones by hand are worth a try beside it."""
    began = time.perf_counter()
    pool.reset(args.pool_nbytes)
    with open_device(args.device) as device, Engine(decoder, device, options) as engine:
        fill(engine)
        if device.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ready_s = round(time.perf_counter() - began, 1)
        took = _steps(engine, args)
        chosen = engine.step_options
        line = {
            "steps": args.steps,
            "step_s": spread(took),
            "predicted_step_s": engine.predicted_step_s,
            "plan_gib": {tier: round(nbytes / GIB, 3) for tier, nbytes in engine.memory().items()},
            "gpu_peak_gib": round(device.peak_nbytes() / GIB, 3),
            "cpu_threads": engine.kernels.threads,
            "options": {k: v for k, v in dataclasses.asdict(engine.options).items() if k != "ahead"},
            "placed": placed(engine.layout, chosen),
            "ready_s": ready_s,
        }
        return line, _by_the_clock(engine, options)[: args.manual]


def _by_the_clock(engine: Engine, options: EngineOptions) -> list[tuple[str, EngineOptions]]:
    """Placements by hand that fit and are not what was chosen, fastest first as far as the clock knows."""
    found = list(by_hand(engine.layout, options).items())
    if engine.costs is None:
        return found
    nbytes = options.max_gpu_memory or torch.cuda.get_device_properties(0).total_memory
    room = Room(engine.layout, options, engine.costs, engine.decoder.hidden_size, engine.decoder.dtype, nbytes)
    heads = {engine.options.sliced_head, False}
    found = [
        (name + ", sliced head" * sliced, replace(hand, sliced_head=sliced)) for name, hand in found for sliced in heads
    ]
    fitting = [(name, hand) for name, hand in found if hand != engine.options and room.used(hand) <= nbytes]
    return sorted(fitting, key=lambda one: room.step_s(one[1]))


def _steps(engine: Engine, args: argparse.Namespace) -> list[float]:
    """Seconds from the end of a step to the end of the next, with one always queued behind."""
    ends: list[float] = []
    before = None
    for index in range(args.warmup + args.steps):
        tokens = random_tokens(index, args.batch, args.seq, engine.decoder.vocab_size)
        result = engine.step([MicroBatch(tokens, tokens)], lr=LR)
        if before is not None:
            before.wait()
            ends.append(time.perf_counter())
        before = result
    before.wait()
    ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends)][args.warmup - 1 :]


def verdicts(lines: Sequence[Line]) -> Iterator[Target]:
    """Of one shape and limit: the automatic placement's clock and bytes, and how it does beside those by hand."""
    auto = next((line for line in lines if line["case"] == AUTO), None)
    if auto is None:
        return
    name, seconds = f"{auto['shape']}@{auto['gpu_limit_gib']:g}", auto["step_s"]["median"]
    if auto["predicted_step_s"]:
        yield Target(f"{name}, predicted step off by", abs(auto["predicted_step_s"] / seconds - 1), STEP_OFF)
        over = auto["plan_gib"]["device"] / auto["gpu_peak_gib"]
        yield Target(f"{name}, planned bytes of the device over measured ones", over, 1.0, least=True)
        yield Target(f"{name}, planned bytes of the device over measured ones", over, BYTES_OVER)
    others = [line["step_s"]["median"] for line in lines if line is not auto]
    if others:
        yield Target(f"{name}, step over the best by hand", seconds / min(others), AUTO_OVER)


def report(path: Path) -> int:
    """A table and verdicts for each shape and limit of each call."""
    calls: dict[tuple[object, ...], list[Line]] = {}
    for line in read(path):
        if line["bench"] == "sweep":
            calls.setdefault(tuple(line[key] for key in ("run", "shape", "batch", "gpu_limit_gib")), []).append(line)
    for (run_id, name, batch, limit), lines in calls.items():
        first = lines[0]
        print(f"{name}, {batch} x {first['seq']}, {limit:g} GiB of {first['gpu']}, run {run_id}\n")
        print("| placement | step s | min-max | predicted | planned GiB | measured GiB |\n|---|---|---|---|---|---|")
        for line in lines:
            times, told = line["step_s"], line["predicted_step_s"]
            what = f"{line['case']}: {line['placed']}" if line["case"] == AUTO else line["case"]
            print(
                f"| {what} | {times['median']:.4g} | {times['min']:.4g}-{times['max']:.4g} "
                f"| {f'{told:.4g}' if told else ''} | {line['plan_gib']['device']:.2f} | {line['gpu_peak_gib']:.2f} |"
            )
        print("\n" + "\n".join(str(verdict) for verdict in verdicts(lines)) + "\n")
    return 0 if calls else 2


def pair(text: str) -> tuple[str, float]:
    name, _, limit = text.partition("@")
    if not limit.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be SHAPE@GIB, such as llama-3.2-1b@24")
    return name, float(limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=pair, default=[], metavar="SHAPE@GIB")
    parser.add_argument("--num-layers", type=int, help="cut the shapes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--manual", type=int, default=3, help="placements by hand that are measured; 0: none")
    parser.add_argument("--tile-numel", type=int, default=16 << 20)
    parser.add_argument("--device", default="cuda", help="cpu only tries the script")
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--report", type=Path, help="print the tables of a file, and measure nothing")
    args = parser.parse_args()
    if args.report:
        return report(args.report)
    if not args.only:
        parser.error("--only is empty, must name at least one SHAPE@GIB")
    if args.warmup < 1 or args.steps < 1:
        parser.error(f"--warmup is {args.warmup} and --steps {args.steps}, must be at least 1 each")
    common = shared("sweep", new_run(), sys.argv)
    args.pool_nbytes = int(max(STATE_NBYTES * num_params(_config(name, args)) for name, _ in args.only))
    with HostPool() as pool, measured_once():
        for name, limit in args.only:
            measure(name, limit, args, pool, common)
    return 0


if __name__ == "__main__":
    sys.exit(main())
