"""Kills runs at random moments, and holds every restart to what an unbroken run has.

    PYTHONPATH=src python tests/faults/campaign.py --minutes 10          # as `make soak` does
    PYTHONPATH=src python tests/faults/campaign.py --kills 200

One cycle: a run of STEPS steps is killed and started again until it ends; then its result and its metrics must be
those of the reference. Before every restart the newest complete checkpoint must be the reference's of that step, bit
for bit, and the restart must say that it goes on from it. Where a kill fell is read off what it left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.forks import Child, Server, make_toy, write_config  # noqa: E402
from slideformer.train import checkpoint, retention  # noqa: E402

STEPS = 24
EVALUATIONS = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 7, "per_device_eval_batch_size": 2}
MOMENTS = ("anywhere", "start", "save", "save", "rotation", "rotation", "term")
UNITS_OF_THE_MACHINE = ("_pct", "_gib", "_gb", "_gbps")
TIMES = ("tokens_per_second", "step_time", "eta_seconds", "tflops", "mfu")


@dataclass
class Counts:
    """kills: by SIGKILL, of runs that had not ended; in_saves, in_rotations: those that fell inside one."""

    kills: int = 0
    in_saves: int = 0
    in_rotations: int = 0
    terms: int = 0
    restarts: int = 0
    from_checkpoint: int = 0
    cycles: int = 0
    steps: set[int] = field(default_factory=set)  # where restarts began

    def __str__(self) -> str:
        found = {**asdict(self), "steps": len(self.steps)}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())


def state_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def metrics_of(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in TIMES and not k.endswith(UNITS_OF_THE_MACHINE)} for line in lines
    ]


class Campaign:
    """Counts add up over cycles. seed: of the moments and of the settings that must not matter."""

    def __init__(self, server: Server, folder: Path, *, seed: int) -> None:
        self.server, self.folder, self.chance, self.counts = server, folder, random.Random(seed), Counts()
        self.model, self.rows = make_toy(folder)
        reference = folder / "reference"
        self._write(reference, save_steps=1, save_total_limit=None)
        child = server.start(reference, "train", "train.yaml")
        assert child.wait() == 0, child.told()
        self.reference = reference / "out"
        self.broken = folder / "broken"
        self.out = self.broken / "out"

    def _write(self, folder: Path, **settings: object) -> None:
        write_config(folder, self.model, self.rows, **{"max_steps": STEPS, **EVALUATIONS, **settings})

    def step(self) -> None:
        """One start of the run, and what happens to it."""
        chance = self.chance
        before = self._newest()
        same_maths = {
            "window": chance.choice((1, 2)),
            "tile_numel": chance.choice((500, 1000, 10_000)),
            "cpu_threads": chance.choice((1, 2)),
            "ring": chance.choice((2, 4)),
            "save_steps": chance.choice((1, 1, 1, 2)),
            "save_total_limit": chance.choice((1, 2, 2, 3)),
            **self._disk_tier(),
        }
        self._write(self.broken, resume_from_checkpoint="auto", **same_maths)
        child = self.server.start(self.broken, "train", "train.yaml")
        self.counts.restarts += 1
        moment = chance.choice(MOMENTS)
        self._wait_for(moment, child)
        if child.alive():
            child.send(signal.SIGTERM if moment == "term" else signal.SIGKILL)
        code = child.wait()
        # A SIGTERM that comes when the result has been written ends the process as it ends any other.
        assert code in (0, -signal.SIGKILL, 143, -signal.SIGTERM), f"{code}: {child.told()}"
        self._judge(child, code, before)

    def _disk_tier(self) -> dict[str, object]:
        """Every second start has some of its state in files, in a folder of its own: what a killed run left is kept."""
        for left in self.broken.glob("tier-*"):
            shutil.rmtree(left)
        if self.chance.random() < 0.5:
            return {}
        shares = {"offload_optimizer": self.chance.choice((0.5, "nvme")), "offload_weights": self.chance.choice((0, 1))}
        return {"offload_dir": f"tier-{self.counts.restarts}", **shares}

    def _wait_for(self, moment: str, child: Child) -> None:
        if moment == "start":
            time.sleep(self.chance.uniform(0, 0.25))
            return
        while child.alive() and "\nstep " not in child.told():
            time.sleep(0.002)
        if moment in ("anywhere", "term"):
            time.sleep(self.chance.uniform(0, 0.3))
            return
        suffix = ".partial" if moment == "save" else ".removed"
        until = time.monotonic() + 1.0
        delay = self.chance.uniform(0, 0.004) if moment == "save" else 0.0
        for _ in range(self.chance.randrange(3)):  # not always the first one
            self._leftover(suffix, until)
            while self._has(suffix) and time.monotonic() < until:
                pass
        if self._leftover(suffix, until):
            time.sleep(delay)

    def _has(self, suffix: str) -> bool:
        return self.out.is_dir() and any(path.name.endswith(suffix) for path in self.out.iterdir())

    def _leftover(self, suffix: str, until: float) -> bool:
        while time.monotonic() < until:
            if self._has(suffix):
                return True
        return False

    def _newest(self) -> Path | None:
        """The newest complete checkpoint, which must be the reference's."""
        complete = [path for _, path in retention.numbered(self.out) if checkpoint.is_complete(path)]
        if not complete:
            return None
        assert state_of(complete[0]) == state_of(self.reference / complete[0].name), complete[0].name
        return complete[0]

    def _judge(self, child: Child, code: int, before: Path | None) -> None:
        told, counts = child.told(), self.counts
        assert "warning" not in told and "Traceback" not in told, told
        if before is not None and "\nmemory: " in told:  # it came as far as to load something
            assert f"going on from out/{before.name}," in told, f"{before.name}: {told}"
            counts.from_checkpoint += 1
            counts.steps.add(int(before.name.rpartition("-")[2]))
        after = self._newest()
        assert before is None or after is not None, "there was a complete checkpoint, and now there is none"
        if code in (0, 143):
            assert not list(self.broken.glob("tier-*")), "files of the disk tier are left"
        if code == -signal.SIGKILL:
            counts.kills += 1
            counts.in_saves += self._has(".partial")
            counts.in_rotations += self._has(".removed") or self._has(".old")
        elif code == -signal.SIGTERM:
            counts.terms += 1
            assert (self.out / "model.safetensors").is_file() or "\nmemory: " not in told, told
        elif code == 143:
            counts.terms += 1
            assert not self._has(".partial") and not self._has(".removed")
            assert "before the first step" in told or f"go on from {after.name} with" in told, told
        else:
            assert state_of(self.out / f"checkpoint-{STEPS}") == state_of(self.reference / f"checkpoint-{STEPS}")
            assert (self.out / "model.safetensors").read_bytes() == (self.reference / "model.safetensors").read_bytes()
            assert metrics_of(self.out) == metrics_of(self.reference)
            assert not [path for path in self.out.iterdir() if path.name.startswith(".")]
            shutil.rmtree(self.out)
            counts.cycles += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--kills", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    until, told = time.monotonic() + 60 * args.minutes, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slideformer-campaign-") as folder, Server() as server:
        campaign = Campaign(server, Path(folder), seed=args.seed)
        while time.monotonic() < until and campaign.counts.kills < args.kills:
            campaign.step()
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(campaign.counts, flush=True)
    print(campaign.counts)


if __name__ == "__main__":
    main()
