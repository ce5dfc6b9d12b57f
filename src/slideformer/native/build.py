"""Builds the native library where the package lies: `python -m slideformer.native.build`.

For a checkout without pip (PYTHONPATH=src), and for an installation that had no compiler at the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from slideformer.native.library import LIBRARY_NAME, SOURCES

COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300  # a build takes ~4 s on one core


class BuildFailed(RuntimeError):
    """The library could not be built; the text is one sentence, with the compiler's error if there was one."""


def build(target: Path) -> None:
    """Build the library and put it at `target`, at once and whole. Raises BuildFailed."""
    if not _compiler():
        raise BuildFailed(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)}, and CXX is not set)")
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if cmake is None:
        raise BuildFailed("no cmake on PATH (pip install cmake)")
    with tempfile.TemporaryDirectory(prefix="slideformer-build-") as folder:
        _run([cmake, "-S", str(SOURCES), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"])
        _run([cmake, "--build", folder, "--parallel"])
        fresh = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(Path(folder) / LIBRARY_NAME, fresh)
        fresh.replace(target)  # a process that has the old one open keeps it


def why_missing() -> str:
    """Why there is no library: what is missing, or the compiler's error, found by trying (a few seconds)."""
    with tempfile.TemporaryDirectory(prefix="slideformer-try-") as folder:
        try:
            build(Path(folder) / LIBRARY_NAME)
        except BuildFailed as failure:
            return str(failure)
    return "it was never built here, though it can be"


def _compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{command[0]} took longer than {TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "error" in line.lower()), max(len(lines) - 3, 0))
        raise BuildFailed("the build failed: " + " | ".join(lines[first : first + 3]))


def main() -> None:
    try:
        build(Path(__file__).with_name(LIBRARY_NAME))
    except BuildFailed as failure:
        raise SystemExit(f"slideformer: {failure}") from None


if __name__ == "__main__":
    main()
