"""Without a compiler the package installs and works, and says once what that costs and why."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LOAD_TWICE = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from slideformer import native
print(type(native.load()).__name__, type(native.load(3)).__name__)
print(native.__file__)
"""


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages without slideformer: an installed library would be found."""
    folder = tmp_path_factory.mktemp("neighbours")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "slideformer" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package as it is before anything is built."""
    shutil.copytree(ROOT / "src/slideformer", tmp_path / "slideformer", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    return tmp_path


def python(package: Path, neighbours: Path, *arguments: str, path: str | None = None) -> list[str]:
    """What a Python prints that finds the package in this folder, and no site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": os.environ["PATH"] if path is None else path, "PYTHONPATH": f"{package}:{neighbours}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def load_twice(package: Path, neighbours: Path, *, path: str | None = None) -> list[str]:
    """What a process prints that loads the kernels of this package twice."""
    lines = python(package, neighbours, "-c", LOAD_TWICE, path=path)
    assert str(package) in lines.pop()
    return lines


def test_a_machine_without_a_compiler_gets_a_wheel_that_works(tmp_path: Path, neighbours: Path):
    (tmp_path / "bin").mkdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    built = subprocess.run(
        [*pip, str(ROOT)], capture_output=True, text=True, timeout=100, env={"PATH": str(tmp_path / "bin")}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("slideformer-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    warning, kinds = load_twice(tmp_path / "installed", neighbours, path=str(tmp_path / "bin"))
    assert kinds == "TorchKernels TorchKernels"
    assert warning.startswith("WARNING The optimizer runs in torch, about ") and "times slower" in warning
    assert "no C++ compiler on PATH (looked for c++, g++, clang++, and CXX is not set)" in warning


def test_a_compilers_error_is_quoted(package: Path, neighbours: Path):
    with (package / "slideformer/native/csrc/pool.cpp").open("a") as source:
        source.write("int broken(;\n")
    warning, kinds = load_twice(package, neighbours)
    assert kinds == "TorchKernels TorchKernels"
    assert "pool.cpp" in warning and "error: " in warning


def test_a_library_built_in_place_is_loaded_until_the_sources_change(package: Path, neighbours: Path):
    python(package, neighbours, "-m", "slideformer.native.build")
    assert load_twice(package, neighbours) == ["NativeKernels NativeKernels"]
    with (package / "slideformer/native/csrc/pool.h").open("a") as source:
        source.write("// changed\n")
    warning, kinds = load_twice(package, neighbours)
    assert kinds == "TorchKernels TorchKernels"
    assert "libslideformer_native.so was built from other sources than" in warning


def test_a_broken_library_is_reported_and_not_fatal(package: Path, neighbours: Path):
    (package / "slideformer/native/libslideformer_native.so").write_bytes(b"not a library")
    warning, kinds = load_twice(package, neighbours)
    assert kinds == "TorchKernels TorchKernels"
    assert "libslideformer_native.so" in warning
