"""What is the most that fits: the largest batch, or the most layers, that a case still trains within a limit?

    python benchmarks/reach.py --over batch --case ours-streamed:deferred --shape llama-3.2-1b --gpu-limit 24
    python benchmarks/reach.py --over num-layers --case stock-resident --shape llama-3.1-8b --batch 1 --gpu-limit 24

Doubles until it does not fit, then halves the interval, to one part in 64. Every try is a call of step.py for one step,
in a process of its own, with the limit for every case alike; a try that ends for another reason than memory ends the
search. Other options are step.py's; with --out, every try that fits leaves its line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DOES_NOT_FIT = (3, -9, 137)
"""step.py's own word for it, and the kernel's, when it takes a process that uses too much host memory."""


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=("batch", "num-layers"), required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--low", type=int, default=1)
    parser.add_argument("--high", type=int, default=4096)
    args, rest = parser.parse_known_args()

    def fits(size: int) -> bool:
        words = [f"--{args.over}", str(size), "--cases", args.case, "--steps", "1", "--warmup", "1", "--limit-all"]
        command = [sys.executable, str(Path(__file__).parent / "step.py"), *rest, *words]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if code not in (0, *DOES_NOT_FIT):
            raise SystemExit(f"{args.over} {size} ended with {code}, which is neither 0 nor for want of memory")
        print(f"{args.over} {size}: {'fits' if code == 0 else 'does not fit'}", flush=True)
        return code == 0

    found = largest(fits, args.low, args.high)
    print(
        f"{args.case}: {args.over} {found} is the largest that fits" + (" (of those asked for)" * (found == args.high))
    )
    return 0 if found else 3


if __name__ == "__main__":
    sys.exit(main())
