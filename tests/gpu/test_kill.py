"""A streamed run of the 1B shape on the GPU that is killed, in a save and in a rotation, goes on bit for bit.

Each run is a process of its own: a CUDA context does not survive a fork. Deterministic kernels, since two runs differ
otherwise. Needs about 60 GiB of disk under the temporary folder and 40 GiB of host memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu.saved_model import save, write_rows  # noqa: E402
from shapes import shape  # noqa: E402
from slideformer.train import checkpoint, retention  # noqa: E402

STEPS = 3
PROGRAM = """
from slideformer.train import trainer
trainer.check_parity = lambda *args, **settings: None  # the CPU's business, and tests/model's
from slideformer.cli import main
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(shape("llama-3.2-1b"), folder)
    return folder


def start(folder: Path, model: Path, **settings: object) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    rows = folder / "rows.jsonl"
    write_rows(rows)
    fields = {
        "model_name_or_path": str(model),
        "dataset": str(rows),
        "output_dir": str(folder / "out"),
        "device": "cuda",
        "placement": "stream",
        "max_length": 512,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "full_determinism": True,
        "save_steps": 1,
        "save_total_limit": 1,
        "resume_from_checkpoint": "auto",
        **settings,
    }
    words = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "train", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def newest(out: Path) -> str:
    found = [path.name for _, path in retention.numbered(out) if checkpoint.is_complete(path)]
    return found[0] if found else "-"


@pytest.mark.timeout(900)
def test_a_run_of_the_1b_shape_that_is_killed_in_a_save_and_in_a_rotation_ends_as_one_that_was_not(
    model: Path, tmp_path: Path
) -> None:
    began = time.monotonic()

    def passed(what: str) -> None:
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)

    straight = start(tmp_path / "straight", model, save_strategy="no", save_steps=None, save_dtype="float32",
                     resume_from_checkpoint=False)  # fmt: skip
    told, _ = straight.communicate()
    assert straight.returncode == 0, told
    passed("straight")
    broken = tmp_path / "broken"
    for moment, wanted in (("in the second save", ".partial"), ("in a rotation", ".removed")):
        before = newest(broken / "out")
        process = start(broken, model, save_dtype="float32")
        while process.poll() is None and not was_reached(broken / "out", wanted):
            time.sleep(0.01)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        told, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, told
        assert (f"going on from {broken}/out/{before}," in told) == (before != "-"), told
        passed(moment)
    before = newest(broken / "out")
    last = start(broken, model, save_dtype="float32")
    told, _ = last.communicate()
    assert last.returncode == 0, told
    assert f"going on from {broken}/out/{before}," in told
    passed("to the end")
    for path in sorted((tmp_path / "straight/out").glob("*.safetensors")):
        assert path.read_bytes() == (broken / "out" / path.name).read_bytes(), path.name
    shutil.rmtree(tmp_path)


def was_reached(out: Path, suffix: str) -> bool:
    """A checkpoint is complete, and another one is at that stage of its life."""
    return out.is_dir() and newest(out) != "-" and any(path.name.endswith(suffix) for path in out.iterdir())
