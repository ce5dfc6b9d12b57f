"""Where the native library lies, and what happens where there is none."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import metadata
from math import ceil
from pathlib import Path

from slideformer.native.disk import NativeDisk
from slideformer.native.kernels import HostKernels, TorchKernels
from slideformer.native.library import LIBRARY_NAME, NativeKernels, open_library

# benchmarks/optimizer.py: 70 with AVX-512 on 16 threads, 50 on 2 (Sapphire Rapids, 2026-11-30).
TORCH_SLOWDOWN = 60

log = logging.getLogger(__name__)


def load(threads: int | None = None, *, isa: str | None = None) -> HostKernels:
    """The native kernels on `threads` threads (None: every CPU this process may use), or the torch stand-in.

    Where there is no library, or none of these sources, the first call says so at WARNING, with the cost and the
    compiler's error. Raises ValueError for a thread count below 1 or an instruction set that cannot run here.
    """
    problems: list[str] = []
    for path in filter(Path.exists, _places()):
        try:
            return NativeKernels(open_library(path), threads=available_cpus() if threads is None else threads, isa=isa)
        except OSError as error:
            problems.append(str(error))
    _warn_once("; ".join(problems))
    return TorchKernels()


def load_disk(threads: int, block_nbytes: int, *, sums: bool = True) -> NativeDisk | None:
    """Threads of the native library that move blocks between memory and files; None where there is no library.

    Raises OSError where the threads cannot be started.
    """
    for path in filter(Path.exists, _places()):
        try:
            library = open_library(path)
        except OSError:
            continue
        return NativeDisk(library, threads=threads, block_nbytes=block_nbytes, sums=sums)
    return None


def _places() -> list[Path]:
    """Where the library may lie: beside this file (installed, or built in the tree), and where the installed package
    keeps it. The two differ for an editable install: sources stay in the tree, the library goes to site-packages."""
    places = [Path(__file__).with_name(LIBRARY_NAME)]
    try:
        installed = metadata.distribution("slideformer")
    except metadata.PackageNotFoundError:
        return places
    return [*places, Path(str(installed.locate_file(f"slideformer/native/{LIBRARY_NAME}")))]


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and the CPU quota of its cgroup."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(min(allowed, ceil(int(quota) / int(period))), 1)


@cache
def _warn_once(problem: str) -> None:
    from slideformer.native.build import why_missing  # here, so that `python -m` does not find it imported already

    log.warning(
        "The optimizer runs in torch, about %d times slower than in the native library, which cannot be loaded: %s. "
        "To have it, install a C++17 compiler and cmake and run `python -m slideformer.native.build`.",
        TORCH_SLOWDOWN,
        problem or why_missing(),
    )
