"""What is the most that fits: the largest batch, or the most layers, that each case still trains within a limit?

    python benchmarks/reach.py --over batch --shape llama-3.2-1b --gpu-limit 24 --out reach.jsonl
    python benchmarks/reach.py --over num-layers --shape llama-3.1-8b --batch 1 --gpu-limit 24 --high 40
    python benchmarks/reach.py --report reach.jsonl

Doubles until it does not fit, then halves the interval, to one part in 64. Every case has a process of its own, all at
the same time, since nothing is timed, each with the limit. The stock model really trains a step at every try. Ours is
planned at every try, from measured blocks; the largest that its plan allows then really trains steps, and if that does
not fit the search goes on below it. A case that ends for another reason than memory ends the search. One JSON line a
case, and with --out the step of the largest of ours.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cases import MODULES, Settings, parse_case
from targets import Target

OF_STOCK = {"batch": 8.0, "num_layers": 6.0}
"""Least that ours reaches, times the ceiling: in batch, or in parameters."""

POOL_NBYTES = 12.5
"""Of host memory, a parameter."""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size in [low, high] that fits, if every smaller one does; 0 if low does not."""
    if not fits(low):
        return 0
    size = low
    while size < high and fits(min(2 * size, high)):
        size = min(2 * size, high)
    above = min(2 * size, high + 1)
    while above - size > max(1, size // 64):
        middle = (size + above) // 2
        if fits(middle):
            size = middle
        else:
            above = middle
    return size


class Tries:
    """Sizes that were tried, and why some did not fit."""

    def __init__(self, settings: Settings, over: str) -> None:
        self.settings, self.over = settings, over
        self.why_not: dict[int, str] = {}
        self.num = 0

    def of(self, size: int) -> Settings:
        return replace(self.settings, **{self.over: size})

    def fits(self, attempt: Callable[[Settings], object], size: int) -> bool:
        """Raises what is not for want of memory."""
        import torch

        from slideformer.device import LaneFailure
        from slideformer.errors import DoesNotFit

        self.num += 1
        self.why_not.pop(size, None)
        try:
            attempt(self.of(size))
        except (DoesNotFit, MemoryError, torch.OutOfMemoryError) as error:
            self.why_not[size] = str(error).splitlines()[0]
        except LaneFailure as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            self.why_not[size] = str(error.__cause__).splitlines()[0]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{self.over} {size}: {self.why_not.get(size, 'fits')}", file=sys.stderr, flush=True)
        return size not in self.why_not


def plan(settings: Settings) -> None:
    """What an engine of ours does before it allocates anything. Raises DoesNotFit."""
    import torch

    from cases.ours import options_of
    from shapes import shape
    from slideformer.device import open_device
    from slideformer.engine.settle import settle
    from slideformer.model.decoder import Decoder
    from slideformer.native import available_cpus, load

    with open_device(settings.device) as device:
        dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
        config = shape(settings.shape, num_layers=settings.num_layers)
        decoder = Decoder(config, dtype=dtype, tile_numel=settings.tile_numel, device=device.torch_device)
        kernels = load(settings.cpu_threads or available_cpus())
        try:
            settle(options_of(settings, decoder.layout), decoder, device, kernels)
        finally:
            kernels.close()


def worker(settings: Settings, over: str, low: int, high: int, run: str, out: str | None) -> int:
    """Find the largest of a case and write its line."""
    import torch

    import cases
    from cases.loop import open_torch_device
    from lines import shared, write
    from shapes import shape
    from step import describe, num_params

    ours, tries = MODULES[settings.case] == "ours", Tries(settings, over)
    measured: dict[str, object] = {}
    open_torch_device(settings)  # sets the limit
    if not ours:
        found = largest(lambda size: tries.fits(cases.measure, size), low, high)
    else:
        from pool import HostPool, measured_once

        with measured_once(), HostPool() as pool:
            found = largest(lambda size: tries.fits(plan, size), low, high)
            while found >= low:
                layers = tries.of(found).num_layers
                pool.reset(int(POOL_NBYTES * num_params(shape(settings.shape, num_layers=layers))))
                if tries.fits(lambda one: measured.update(cases.measure(one)), found):
                    break
                found -= 1
        if found >= low:
            write(shared("step", run, sys.argv) | describe(tries.of(found), measured), out)
    refused = min((size for size in tries.why_not if size > found), default=None)
    at = tries.of(max(found, low))
    line = shared("reach", run, sys.argv) | {
        "case": settings.case,
        "cpu_threads": torch.get_num_threads(),
        "over": over,
        "largest": found,
        "refused": refused,
        "why_not": None if refused is None else tries.why_not[refused],
        "params": num_params(shape(settings.shape, num_layers=at.num_layers)) if found else 0,
        "tries": tries.num,
        "micro_batches": measured.get("micro_batches", settings.micro_batches),
        **{key: getattr(at, key) for key in ("shape", "num_layers", "batch", "seq", "update", "gpu_limit_gib")},
        "max_grad_norm": settings.max_grad_norm,
    }
    write(line, out)
    return 0


def verdicts(lines: Sequence[dict]) -> list[Target]:
    """Of one call: ours over the ceiling."""
    stock = next((line for line in lines if line["case"] == "stock-resident"), None)
    found = []
    for line in lines:
        if MODULES[line["case"]] == "ours" and stock is not None and stock["largest"]:
            key = "largest" if line["over"] == "batch" else "params"
            what = "batch" if line["over"] == "batch" else "parameters"
            ratio = line[key] / stock[key]
            found.append(
                Target(f"{line['case']}, largest {what} over the ceiling's", ratio, OF_STOCK[line["over"]], True)
            )
    return found


def report(path: Path, run: str | None = None) -> int:
    from report import read

    calls: dict[str, list[dict]] = {}
    for line in read(path):
        if line["bench"] == "reach" and run in (None, line["run"]):
            calls.setdefault(line["run"], []).append(line)
    for name, lines in calls.items():
        first = lines[0]
        limit = "" if first["gpu_limit_gib"] is None else f", {first['gpu_limit_gib']:g} GiB of {first['gpu']}"
        print(f"{first['shape']}{limit}, run {name}")
        for line in lines:
            refused = f", {line['refused']} does not fit" if line["refused"] else " (of those asked for)"
            parts = f" in {line['micro_batches']} micro-batches" if line.get("micro_batches", 1) > 1 else ""
            print(
                f"  {line['case']}: {line['over']} {line['largest']}{parts}{refused}; "
                f"{line['params'] / 1e9:.2f} B parameters"
            )
        print("\n".join(str(target) for target in verdicts(lines)))
    return 0 if calls else 2


def main() -> int:
    from step import parse, settings_of  # torch is for workers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=("batch", "num-layers"), default="batch")
    parser.add_argument("--cases", nargs="+", default=["ours-streamed:eager", "stock-resident"])
    parser.add_argument("--low", type=int, default=1)
    parser.add_argument("--high", type=int, default=4096)
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--report", type=Path, help="print what a file says, and measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.report:
        return report(args.report)
    words = parse(["--steps", "1", "--warmup", "1", *rest, "--limit-all", "--cases", *args.cases])
    over = args.over.replace("-", "_")
    if args.worker:
        words.worker = args.worker
        return worker(settings_of(words), over, args.low, args.high, args.run, args.out)
    import uuid

    run = uuid.uuid4().hex[:12]
    again = [sys.executable, __file__, *sys.argv[1:], "--run", run, "--worker"]
    for name in args.cases:
        parse_case(name)
    running = [subprocess.Popen([*again, name], stdout=subprocess.DEVNULL) for name in args.cases]
    codes = [process.wait() for process in running]
    if args.out and Path(args.out).exists():
        report(Path(args.out), run)
    if failed := [f"{n} ({c})" for n, c in zip(args.cases, codes, strict=True) if c]:
        print(f"ended for another reason than memory: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
