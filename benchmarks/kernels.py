"""How fast is each kernel, beside eager torch, torch.compile and Liger-Kernel, and what are the limits of the device?

    python benchmarks/kernels.py [--shapes llama-3.2-3b,qwen3-8b] [--only OP,...] [--out results.jsonl]
    python benchmarks/kernels.py --report results.jsonl

Forward and backward of one op at the sizes of a model, bf16. One JSON line an op and implementation, all of one call
under one `run`: milliseconds, the most memory taken above the inputs (MiB), bytes or FLOPs a second, and the share of
what a plain copy or an 8192^3 matrix product reaches in the same call. Implementations take turns, in
another order each time, so that all meet the same machine. Before anything is timed, other processes compile everything
at once, into the caches of Triton and of torch. The report ends with the targets (kernel_targets.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lines import new_run, shared, spread, write

if TYPE_CHECKING:
    from kernel_cases import Op

COPY_NBYTES, MATRIX = 1 << 30, 8192
WARMUP = 3
OPS = "norm,residual,rotary,swiglu,cross_entropy,adamw,squared_norm,block,packed"
TOGETHER = ("norm,residual", "rotary,swiglu", "cross_entropy", "block", "packed,adamw,squared_norm")
"""Ops that one process compiles."""
COMPILE_S = 75.0
"""Seconds that these processes may take."""


class Clock:
    """Milliseconds of a call on the device's own clock. What ran before is never in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ms(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            work()
            return (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        torch.cuda._sleep(
            2_000_000
        )  # about a millisecond: launches run ahead, so that the gaps between them are not seen
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_mib(self, work: Callable[[], object]) -> float | None:
        """The most that torch's allocator gave out during the call, above what was out before."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return round(peak / 2**20, 1)


def limits(clock: Clock, reps: int) -> dict[str, float]:
    """GB/s of a copy (read and written bytes counted) and TFLOP/s of a matrix product."""
    small = clock.device.type != "cuda"
    nbytes, n = (1 << 24, 512) if small else (COPY_NBYTES, MATRIX)
    dtype = torch.float32 if small else torch.bfloat16
    source = torch.ones(nbytes // 4, device=clock.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=clock.device, dtype=dtype) for _ in range(2))
    copy = statistics.median([clock.ms(lambda: target.copy_(source)) for _ in range(reps + WARMUP)][WARMUP:])
    product = statistics.median([clock.ms(lambda: a @ b) for _ in range(reps + WARMUP)][WARMUP:])
    return {"copy_gbps": round(2 * nbytes / copy / 1e6, 1), "gemm_tflops": round(2 * n**3 / product / 1e9, 2)}


def measure(op: Op, clock: Clock, reps: int) -> dict[str, dict[str, object]]:
    """Implementation -> times and peak; one that fails is told and left out."""
    peaks: dict[str, float | None] = {}
    off_by: dict[str, dict[str, float]] = {}
    for name, work in list(op.impls.items()):
        try:
            for _ in range(WARMUP):
                op.prepare()
                found = work()
            if (off := op.off_by(found)) is not None:
                off_by[name] = {"off_by": float(f"{off:.3g}")}
            del found
            op.prepare()
            peaks[name] = clock.peak_mib(work)
        except Exception as error:  # whatever a compiler raises: the other implementations are measured all the same
            print(f"{op.name} {name}: {(str(error) or repr(error)).splitlines()[0]}", file=sys.stderr)
            del op.impls[name]
    times: dict[str, list[float]] = {name: [] for name in op.impls}
    order = list(op.impls)
    for _ in range(reps):
        random.shuffle(order)  # a GPU at its power limit is faster after work that left it cool
        for name in order:
            op.prepare()
            times[name].append(clock.ms(op.impls[name]))
    alike = {"steps": reps}
    return {
        name: {"ms": spread(times[name]), "peak_mib": peaks[name], **alike, **off_by.get(name, {})} for name in times
    }


def rate(op: Op, ms: float, limit: dict[str, float]) -> dict[str, float]:
    if op.nbytes is not None:
        gbps = op.nbytes / ms / 1e6
        return {"gbps": float(f"{gbps:.4g}"), "of_limit": round(gbps / limit["copy_gbps"], 3)}
    if op.flops is not None:
        tflops = op.flops / ms / 1e9
        return {"tflops": round(tflops, 2), "of_limit": round(tflops / limit["gemm_tflops"], 3)}
    return {}


def compile_all(args: argparse.Namespace) -> None:
    """Run everything once, in processes beside each other, so that this one finds it compiled."""
    wanted = (args.only or OPS).split(",")
    parts = [",".join(op for op in ops.split(",") if op in wanted) for ops in TOGETHER]
    calls = [["--shapes", shape, "--only", ops] for shape in args.shapes.split(",") for ops in parts if ops]
    sizes = ["--batch", args.batch, "--seq", args.seq, "--loss-tokens", args.loss_tokens, "--once"]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    command = [sys.executable, __file__, *map(str, sizes)]
    until = time.monotonic() + COMPILE_S
    processes = [subprocess.Popen([*command, *call], env=environment, stdout=subprocess.DEVNULL) for call in calls]
    for process, call in zip(processes, calls, strict=True):
        try:
            status = process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:  # it will fail again below, or be compiled there
            print(f"was not compiled ahead: {' '.join(call)}", file=sys.stderr)
    print(f"compiled ahead in {COMPILE_S + time.monotonic() - until:.0f} s", file=sys.stderr)


def made(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Op]]:
    """Shape and op, each closed when the next is asked for."""
    # Not at the top: transformers looks for a package called `kernels`, and so imports this very file once more.
    from kernel_cases import ops
    from shapes import shape

    for name in args.shapes.split(","):
        config = shape(name, num_layers=1)
        for make in ops(config, batch=args.batch, seq=args.seq, tokens=args.loss_tokens, device=device):
            if make.func.__name__ in (args.only or OPS).split(","):
                op = make()
                yield name, op
                op.close()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def run(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    if args.once:
        for _, op in made(args, device):
            for name, work in op.impls.items():
                if name != "eager":  # which compiles nothing, and takes most memory
                    op.prepare()
                    with suppress(Exception):  # told when it is measured
                        work()
        return
    if device.type == "cuda":
        compile_all(args)
    clock, common = Clock(device), shared("kernels", args.run or new_run(), sys.argv)
    import triton

    common |= {"triton": triton.__version__, "cpu_threads": torch.get_num_threads()}
    limit = limits(clock, args.reps)
    for name, op in made(args, device):
        where = {"shape": name, "batch": args.batch, "seq": args.seq, "op": op.name, "detail": op.detail}
        reps = args.reps if op.nbytes is not None else max(args.reps // 3, 1)  # these take long, and vary little
        for impl, found in measure(op, clock, reps).items():
            measured = found | rate(op, found["ms"]["median"], limit) | limit
            write(common | where | {"case": f"{op.name}:{impl}", "impl": impl} | measured, args.out)


def report(path: Path) -> None:
    """A Markdown table of the last run in the file, and the targets."""
    lines = [line for text in path.read_text().splitlines() if (line := json.loads(text))["bench"] == "kernels"]
    lines = [line for line in lines if line["run"] == lines[-1]["run"]]
    first = lines[0]
    print(f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}; a copy makes {first['copy_gbps']} GB/s, ")
    print(f"an {MATRIX}^3 product {first['gemm_tflops']} TFLOP/s. Run {first['run']}, commit {first['commit']}.\n")
    print("| shape | op | implementation | ms | min-max | x Liger | peak MiB | GB/s or TFLOP/s | of the limit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        same = [
            o for o in lines if all(o[key] == line[key] for key in ("shape", "op", "detail")) and o["impl"] == "liger"
        ]
        ms, peak = line["ms"], line["peak_mib"]
        beside = f"{ms['median'] / same[0]['ms']['median']:.3f}" if same else ""
        speed = line.get("gbps", line.get("tflops", ""))
        print(
            f"| {line['shape']} | {line['op']} ({line['detail']}) | {line['impl']} | {ms['median']:.4g} "
            f"| {ms['min']:.4g}-{ms['max']:.4g} | {beside} | {'' if peak is None else f'{peak:.0f}'} | {speed} "
            f"| {line.get('of_limit', '')} |"
        )
    from kernel_targets import targets

    print("\n" + "\n".join(str(target) for target in targets(lines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.2-3b,qwen3-8b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--loss-tokens", type=int, default=16384, help="of the cross entropy")
    parser.add_argument("--only", help=f"some of {OPS}")
    parser.add_argument("--reps", type=int, default=20, help="of what is memory-bound; a third of it for the others")
    parser.add_argument("--device", default="cuda", help="cpu (with TRITON_INTERPRET=1) only tries the script")
    parser.add_argument("--run", help="id of the call that this belongs to")
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help="print the table of a file's last run, and measure nothing")
    args = parser.parse_args()
    report(args.report) if args.report else run(args)


if __name__ == "__main__":
    main()
