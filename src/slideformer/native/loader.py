"""Where the native library lies, and what happens where there is none."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import metadata
from math import ceil
from pathlib import Path

from slideformer.native.kernels import HostKernels, TorchKernels
from slideformer.native.library import LIBRARY_NAME, NativeKernels, open_library

# Measured by benchmarks/optimizer.py; see its results.
TORCH_SLOWDOWN = 40

log = logging.getLogger(__name__)


def load(threads: int | None = None, *, isa: str | None = None) -> HostKernels:
    """The native kernels on `threads` threads (None: every CPU this process may use), or the torch stand-in.

    Where the library is missing or cannot be loaded, the first call says so at WARNING, with the cost and the
    compiler's error. Raises ValueError for a thread count below 1 or an instruction set that cannot run here.
    """
    path = find_library()
    if path is None:
        _warn_once()
        return TorchKernels()
    try:
        library = open_library(path)
    except OSError as error:
        _warn_once(str(error))
        return TorchKernels()
    return NativeKernels(library, threads=available_cpus() if threads is None else threads, isa=isa)


def find_library() -> Path | None:
    """The library beside this file (installed, or built in the tree), else where the installed package keeps it.

    The two differ for an editable install: the sources stay in the tree, the library goes to site-packages.
    """
    beside = Path(__file__).with_name(LIBRARY_NAME)
    if beside.exists():
        return beside
    try:
        installed = Path(str(metadata.distribution("slideformer").locate_file(f"slideformer/native/{LIBRARY_NAME}")))
    except metadata.PackageNotFoundError:
        return None
    return installed if installed.exists() else None


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and the CPU quota of its cgroup."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(min(allowed, ceil(int(quota) / int(period))), 1)


@cache
def _warn_once(error: str | None = None) -> None:
    from slideformer.native.build import why_missing  # here, so that `python -m` does not find it imported already

    log.warning(
        "The optimizer runs in torch, about %d times slower than the native kernels, which cannot be loaded: %s. "
        "To have them, install a C++17 compiler and cmake and run `python -m slideformer.native.build`.",
        TORCH_SLOWDOWN,
        error or why_missing(),
    )
