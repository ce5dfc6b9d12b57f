"""Does a long run take more and more memory, threads or files?

    PYTHONPATH=src python tests/faults/growth.py --steps 20000

A toy run with checkpoints and evaluations is killed at random moments, and goes on, until it has done half of its
steps; the other half is one process, watched. Prints what it took early and late in that half, and fails if it grew.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.forks import Child, Server, make_toy, write_config  # noqa: E402

ALLOWED_GROWTH_NBYTES = 2**20
"""Of resident memory between the second and the last quarter of what was watched."""


@dataclass(frozen=True)
class Sample:
    """Of a process, at a moment. files: that it has open; entries: in the output folder."""

    step: int
    resident_nbytes: int
    threads: int
    files: int
    entries: int


def step_of(child: Child) -> int:
    """The last that was told, from the end of the log."""
    if not child.log.exists():
        return 0
    with open(child.log, "rb") as file:
        file.seek(max(child.log.stat().st_size - 2000, 0))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.startswith("step ")]
    return int(lines[-1].split()[1].split("/")[0]) if lines else 0


def sample(child: Child, out: Path) -> Sample | None:
    process = Path(f"/proc/{child.pid}")
    try:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Sample(
            step_of(child),
            int(status["VmRSS"].split()[0]) * 1024,
            int(status["Threads"]),
            len(list((process / "fd").iterdir())),
            len([path for path in out.iterdir() if not path.name.startswith(".")]),
        )
    except (OSError, KeyError):  # it has just ended
        return None


def watch(child: Child, out: Path) -> list[Sample]:
    samples = []
    while child.alive():
        if found := sample(child, out):
            samples.append(found)
        time.sleep(0.2)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, half = random.Random(args.seed), args.steps // 2
    with tempfile.TemporaryDirectory(prefix="slideformer-growth-") as name, Server() as server:
        folder = Path(name)
        model, rows = make_toy(folder)
        evaluations = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 100, "logging_steps": 100}
        saves = {"save_steps": 50, "resume_from_checkpoint": "auto", "max_steps": args.steps}
        write_config(folder, model, rows, **evaluations, **saves)
        for kill in range(args.kills):
            child = server.start(folder, "train", "train.yaml")
            until = half * (kill + 1) / args.kills * chance.uniform(0.8, 1.0)
            while child.alive() and step_of(child) < until:
                time.sleep(0.02)
            child.send(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL, child.told()
        child = server.start(folder, "train", "train.yaml")
        start = time.monotonic()
        samples = watch(child, folder / "out")
        assert child.wait() == 0, child.told()[-3000:]
        quarter = len(samples) // 4
        early, late = samples[quarter : 2 * quarter], samples[-quarter:]
        print(f"{args.steps} steps, {args.kills} kills, {len(samples)} samples in {time.monotonic() - start:.0f} s")
        grown = []
        for field in ("resident_nbytes", "threads", "files", "entries"):
            before, after = (median(getattr(one, field) for one in part) for part in (early, late))
            print(f"  {field}: {before:.0f} around step {early[0].step}, {after:.0f} around step {late[0].step}")
            if after - before > (ALLOWED_GROWTH_NBYTES if field == "resident_nbytes" else 0):
                grown.append(field)
    if grown:
        raise SystemExit(f"grown: {', '.join(grown)}")


if __name__ == "__main__":
    main()
