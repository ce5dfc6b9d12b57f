"""What the lines of all benchmarks share: one JSON object a run, with the same keys whatever it measures.

`shared` gives the keys that name the run and the machine; a benchmark adds what it measured and hands the line to
`write`. Lines of one call have one `run`. docs/performance.md says what each key means.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

GIB = 2**30

SETTING_KEYS = ("shape", "batch", "seq", "update", "max_grad_norm", "gpu_limit_gib")
"""Null where a benchmark has no such thing."""


def new_run() -> str:
    return uuid.uuid4().hex[:12]


def shared(bench: str, run: str, command: Sequence[str]) -> dict[str, object]:
    """The keys of every line. command: what was called; of paths, only names are kept."""
    words = [Path(word).name if word.startswith("/") else word for word in command]
    return {
        "bench": bench,
        "run": run,
        "commit": os.environ.get("COMMIT") or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(words[0]).name}", *words[1:]]),
        "machine": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **dict.fromkeys(SETTING_KEYS),
    }


def write(line: dict[str, object], out: str | None) -> None:
    """Print the line, and append it to the file where one is given."""
    text = json.dumps(line)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a") as file:
            file.write(text + "\n")
    print(text, flush=True)


def spread(times: Sequence[float]) -> dict[str, float]:
    return {"min": _short(min(times)), "median": _short(statistics.median(times)), "max": _short(max(times))}


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def host_peak_gib() -> float:
    """The most memory that this process ever had (VmHWM)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 3)


def host_kinds_gib() -> dict[str, float]:
    """What this process has in memory now: its own (anon), files such as libraries, which the kernel may drop (file),
    and what could be shared (shmem). Empty where there is no /proc."""
    status = Path("/proc/self/status")
    rows = (line.split() for line in status.read_text().splitlines()) if status.exists() else ()
    found = {row[0].removesuffix(":"): int(row[1]) for row in rows if row[0].startswith("Rss")}
    return {name.removeprefix("Rss").lower(): round(kib / 2**20, 3) for name, kib in found.items()}


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or None
