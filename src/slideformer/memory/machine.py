"""How much host memory this process may use: the smaller of the machine's and its container's. Reads /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

from slideformer.memory.budget import Limit

UNLIMITED_NBYTES = 1 << 60
"""cgroup v1 writes "no limit" as a huge number (2**63 less a page)."""


def host_limit(root: Path = Path("/")) -> Limit:
    """The machine's memory, or the limit of the container (cgroup v1 or v2, this one's and its parents'), if lower.

    root: where /proc and /sys are, for tests.
    """
    limits = [Limit(_total_nbytes(root), "this machine")]
    limits += [Limit(nbytes, "this container (its memory limit)") for nbytes in _cgroup_limits(root)]
    return min(limits)


def resident_nbytes(root: Path = Path("/")) -> int:
    """What this process already takes, without what is still on disk only; 0 where that cannot be known."""
    try:
        pages = (root / "proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def available_nbytes(root: Path = Path("/")) -> int:
    """What the machine could give to processes without swapping, by the kernel's own estimate; a container's limit
    is not in it. The machine's memory where that cannot be known."""
    found = _meminfo(root, "MemAvailable:")
    return _total_nbytes(root) if found is None else found


def _total_nbytes(root: Path) -> int:
    found = _meminfo(root, "MemTotal:")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found


def _meminfo(root: Path, name: str) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return None


def _cgroup_limits(root: Path) -> list[int]:
    """Of the process's own group and those above it. In a container the group's path may be the host's, which is not
    there; then the mount itself is the group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.strip("/")
        while True:
            limits += _read_limit(group / name)
            if group == mount:
                break
            group = group.parent
    return limits


def _read_limit(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) < UNLIMITED_NBYTES else []
