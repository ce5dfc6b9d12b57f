"""What does each kernel bring to a training step? One engine, and the same steps with each kernel left out in turn.

    python benchmarks/step_kernels.py --shape llama-3.2-3b --batch 32 --case ours-resident --out step-kernels.jsonl
    python benchmarks/step_kernels.py --report step-kernels.jsonl

Per variant a line as step.py writes it, with `variant`: triton-rotary is all kernels but the rotary embedding (which
takes the model's own code), torch none, liger those of liger-kernel. The engine is built once, and only the functions
on the model's modules change. All kernels are measured first and last: what these two differ by, other differences do
not show.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import torch

from cases import MODULES, Settings, parse_case
from cases.loop import open_torch_device
from cases.ours import _steps, options_of
from lines import host_peak_gib, new_run, shared, write
from pool import STATE_NBYTES, HostPool, fill_alike
from report import read
from rules import Line, line_faults
from shapes import shape
from slideformer.device import open_device
from slideformer.engine import Engine
from slideformer.model.decoder import Decoder
from slideformer.model.elementwise import OPS
from slideformer.schedule import OpKind
from step import describe


def decoders(settings: Settings, device: torch.device) -> Iterator[tuple[str, Decoder]]:
    """By variant; "" is the usual one. liger comes last but for that: it changes the rotary function of all models."""
    config = shape(settings.shape, num_layers=settings.num_layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def decoder(kernels: str, *without: str) -> Decoder:
        options = {"kernels": kernels, "without_kernels": without}
        return Decoder(config, dtype=dtype, tile_numel=settings.tile_numel, device=device, **options)

    usual = decoder("auto")
    yield "", usual
    for op in OPS:
        if usual.kernels.get(op) == "triton":
            yield f"triton-{op}", decoder("triton", op)
    yield "torch", decoder("torch")
    if device.type == "cuda" and util.find_spec("liger_kernel") is not None:
        yield "liger", decoder("liger")
    yield "", usual


def run(settings: Settings, run_id: str, out: str | None) -> None:
    with HostPool() as pool, open_device(settings.device) as device:
        torch.zeros(1, device=open_torch_device(settings))  # sets the limit; the context is not ours to count
        before, began = host_peak_gib(), time.perf_counter()
        variants = decoders(settings, device.torch_device)
        name, decoder = next(variants)
        pool.reset(int(STATE_NBYTES * sum(unit.numel for unit in decoder.layout.units)))
        with Engine(decoder, device, options_of(settings, decoder.layout)) as engine:
            fill_alike(engine)
            ready_s = round(time.perf_counter() - began, 1)
            actions = engine.executor._actions[OpKind.FORWARD].__self__
            while True:
                engine.synchronize()
                actions.decoder = decoder
                if device.kind == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                measured = _steps(engine, device, settings)
                line = shared("step", run_id, sys.argv) | describe(settings, measured) | {"variant": name or None}
                write(line | {"kernels": decoder.kernels, "host_before_gib": before, "ready_s": ready_s}, out)
                if (following := next(variants, None)) is None:
                    return
                name, decoder = following


def report(path: Path) -> int:
    """A Markdown table a call and case. Returns 1 where a line does not add up."""
    lines = [line for line in read(path) if "variant" in line]
    faults = [f"{line['case']} {line['variant']}: {fault}" for line in lines for fault in line_faults(line)]
    calls: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        calls.setdefault((line["run"], line["case"]), []).append(line)
    for (name, case), call in calls.items():
        first = call[0]
        print(f"{case}, {first['shape']}, {first['batch']} x {first['seq']}, {first['gpu']}, run {name}\n")
        print("| kernels | step s | min-max | x all of ours | GPU GiB |\n|---|---|---|---|---|")
        for line in call:
            times, text = line["step_s"], (line["variant"] or "all of ours").replace("triton-", "ours but ")
            ratio, spread = times["median"] / first["step_s"]["median"], f"{times['min']:.4g}-{times['max']:.4g}"
            print(f"| {text} | {times['median']:.4g} | {spread} | {ratio:.3f} | {line['gpu_peak_gib']:.2f} |")
        print()
    for fault in faults:
        print(f"does not add up: {fault}", file=sys.stderr)
    return 1 if faults or not lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--num-layers", type=int, help="cut the shape")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--case", default="ours-resident:eager", help="ours-streamed, ours-auto, also :deferred")
    parser.add_argument("--gpu-limit", type=float, help="GiB")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--report", type=Path, help="print the tables of a file, and measure nothing")
    args = parser.parse_args()
    if args.report:
        return report(args.report)
    case = parse_case(args.case)
    if MODULES[case.case] != "ours":
        parser.error(f"--case is {args.case}, must be one of ours")
    settings = Settings(
        case=case.case,
        shape=args.shape,
        num_layers=args.num_layers,
        batch=args.batch,
        seq=args.seq,
        steps=args.steps,
        warmup=args.warmup,
        update=case.update,
        max_grad_norm=1.0 if case.clips else 0.0,
        gpu_limit_gib=case.gpu_limit_gib or args.gpu_limit,
        device=args.device,
    )
    run(settings, new_run(), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
