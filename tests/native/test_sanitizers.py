"""No function of the native library reads or writes beyond its arrays, races, or does what C++ leaves undefined.

The library is built anew with each sanitizer, from the build file that the wheel uses; exercise.cpp calls all of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from native.states import instruction_sets
from slideformer.native.library import LIBRARY_NAME, SOURCES

OPTIONS = {
    "address,undefined": {
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0"},
}
NO_RANDOM_ADDRESSES = ["setarch", "-R"]  # the thread sanitizer of GCC 12 does not know where newer kernels put things


def built(folder: Path, sanitizer: str) -> tuple[Path, Path]:
    """(exercise, library)"""
    flags = f"-O1 -g -fsanitize={sanitizer} -fno-sanitize-recover=all -fno-omit-frame-pointer"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    environment = {**os.environ, "PATH": path}
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    target = folder / "build"
    command = [cmake, *generator, "-S", str(SOURCES), "-B", str(target), "-DCMAKE_BUILD_TYPE=None"]
    run = {"check": True, "capture_output": True, "text": True, "env": environment}
    subprocess.run([*command, f"-DCMAKE_CXX_FLAGS={flags}"], **run)
    subprocess.run([cmake, "--build", str(target), "--parallel"], **run)
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    source, program = Path(__file__).with_name("exercise.cpp"), folder / "exercise"
    words = [*flags.split(), "-std=c++17", f"-I{SOURCES}", str(source), "-o", str(program), "-ldl", "-pthread"]
    subprocess.run([compiler, *words], **run)
    return program, target / LIBRARY_NAME


def exercised(program: Path, library: Path, sanitizer: str) -> subprocess.CompletedProcess[str]:
    fixed = NO_RANDOM_ADDRESSES if shutil.which("setarch") else []
    return subprocess.run(
        [*fixed, str(program), str(library)],
        capture_output=True,
        text=True,
        env={**os.environ, **OPTIONS[sanitizer]},
        timeout=100,
    )


@pytest.mark.parametrize("sanitizer", OPTIONS)
def test_the_library_gives_a_sanitizer_nothing_to_report(tmp_path, sanitizer) -> None:
    done = exercised(*built(tmp_path, sanitizer), sanitizer)
    assert done.returncode == 0, done.stderr[:5000]
    assert done.stdout.split() == instruction_sets()
