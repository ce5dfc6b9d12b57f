"""How much host memory this process may use: the smaller of the machine's and its container's. Reads /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    """What a process could still take without swapping and without a container's end: the kernel's estimate for the
    machine, and each container's limit less what is in use there; page cache counts as free."""
    found = _meminfo(root, "MemAvailable:")
    left = [_total_nbytes(root) if found is None else found]
    for group, names in _cgroups(root):
        used = sum(_numbers(group / names.used)) - _reclaimable_nbytes(group / "memory.stat", names.reclaimable)
        left += [limit - used for name in names.limits for limit in _limits(group / name)]
    return max(min(left), 0)


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
    return [limit for group, names in _cgroups(root) for limit in _limits(group / names.limits[0])]


class _Names(NamedTuple):
    """Of files in a group's folder, and of lines in its memory.stat."""

    limits: tuple[str, ...]  # the first is the one that ends a process
    used: str
    reclaimable: tuple[str, ...]


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The process's own group and those above it. In a container the group's path may be the host's, which is not
    there; then the mount itself is the group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = mount / path.strip("/")
        while True:
            yield group, names
            if group == mount:
                break
            group = group.parent


def _limits(file: Path) -> list[int]:
    return [limit for limit in _numbers(file) if limit < UNLIMITED_NBYTES]


def _numbers(file: Path) -> list[int]:
    """The number that the file is; none where it is not there or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []


def _reclaimable_nbytes(file: Path, names: tuple[str, ...]) -> int:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(value) for name, value in lines if name in names)
