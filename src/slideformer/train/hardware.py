"""What a run was on: processor, memory, GPUs, and which commit of the code around it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from slideformer.memory import host_limit
from slideformer.native import available_cpus

PATIENCE_S = 10.0  # a driver that hangs costs a run this much and no more


def hardware() -> dict[str, object]:
    """For run.json. What cannot be found out is left out."""
    limit = host_limit()
    found: dict[str, object] = {
        "cpu": _cpu_name(),
        "cpus": available_cpus(),
        "host_memory_gib": round(limit.nbytes / 2**30, 1),
        "gpus": gpus(),
    }
    return {name: value for name, value in found.items() if value}


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, also where torch was built without CUDA. Empty if there is none."""
    fields = "--query-gpu=name,memory.total,driver_version"
    text = _said("nvidia-smi", fields, "--format=csv,noheader")
    return [line.strip() for line in (text or "").splitlines() if line.strip()]


def git_commit(folder: Path) -> str | None:
    """The commit of the folder's repository, with "+" where files differ from it; None outside of one."""
    commit = _said("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _said("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return commit.strip() + ("+" if changed and changed.strip() else "")


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _said(command: str, *words: str) -> str | None:
    """What a command prints; None where it is missing, fails or hangs."""
    program = shutil.which(command)
    if program is None:
        return None
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
