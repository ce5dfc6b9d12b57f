"""slideformer bench: what it prints, what it leaves behind (nothing), and how it ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config

from cli.conftest import Done

VOCAB = 259  # of the toy
WORDS = ("model_name_or_path=bare", "device=cpu", "cpu_threads=1", "max_length=32", "tile_numel=4096")
ON_DISK = ("offload_dir=tier", "offload_optimizer=nvme")


@pytest.fixture
def bare(tmp_path: Path, toy: Path) -> Path:
    """A model folder with its config.json and nothing else."""
    (tmp_path / "bare").mkdir()
    shutil.copy(toy / "model/config.json", tmp_path / "bare")
    return tmp_path / "bare"


@pytest.fixture
def measured(slideformer: Callable[..., Done], bare: Path) -> Callable[..., dict]:
    """What `bench --json` prints."""

    def run(*words: str) -> dict:
        done = slideformer("bench", *WORDS, *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_config_without_data_and_weights_is_timed_in_80_columns_and_leaves_nothing(slideformer, bare) -> None:
    done = slideformer("bench", *WORDS, "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for row in ("model ", "on the device", "batch ", "step ", "predicted ", "speed ", "host ", "lanes "):
        assert any(line.startswith(row) for line in lines), row
    assert " over 2 steps," in " ".join(done.stdout.split())
    assert "binds" in done.stdout and "a step takes" in " ".join(done.stdout.split())
    assert done.stderr == "drawing 0.2 M parameters at random\ntraining 2 + 2 steps\n"
    assert [path.name for path in bare.parent.iterdir()] == ["bare"]
    assert [path.name for path in bare.iterdir()] == ["config.json"]


def test_the_object_adds_up_and_promises_what_plan_does(slideformer, measured) -> None:
    words = ("per_device_train_batch_size=2", "gradient_accumulation_steps=2", "freeze=embed")
    found = measured(*words, "--steps=3")
    assert found["step_time_min"] <= found["step_time"] <= found["step_time_max"]
    assert found["tokens_per_second"] * found["step_time"] == pytest.approx(2 * 2 * 32)
    products = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + VOCAB * 64  # four blocks and the output projection
    assert found["tflops"] * 1e12 == pytest.approx(6 * products * found["tokens_per_second"])
    assert "mfu" not in found  # nobody says a CPU's peak
    assert (found["steps"], found["warmup_steps"], len(found["losses"])) == (3, 2, 5)
    assert found["trained_parameters"] == found["parameters"] - VOCAB * 64
    assert 0 < found["busy"]["compute"] <= 1 and found["busy"].keys() >= {"upload", "download", "update"}
    assert found["binds"].endswith(".")
    done = slideformer("plan", *WORDS, *words, "dataset=none.jsonl", "--json")
    planned = json.loads(done.stdout)
    assert found["memory"]["host"]["planned_nbytes"] == planned["host_nbytes"] + planned["device_nbytes"]
    assert found["memory"].keys() == {"host"}
    assert (found["predicted_step_time"], found["predicted_by"]) == (planned["step_time"], "assumed rates")


def test_weights_and_tokens_are_random_by_the_seed_and_the_model_is_trained(measured) -> None:
    first, again, other = (measured(word, "learning_rate=1e-2") for word in ("seed=1", "seed=1", "seed=2"))
    assert first["losses"] == again["losses"] != other["losses"]
    assert first["losses"][0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert first["losses"][0] != pytest.approx(math.log(VOCAB), abs=1e-4)  # what weights of zero would give
    still = measured("seed=1", "learning_rate=0")
    assert still["losses"][0] == first["losses"][0] and still["losses"][-1] != first["losses"][-1]


def test_the_update_program_is_the_config_s(measured) -> None:
    eager, deferred = measured("max_grad_norm=0", "--steps=1"), measured("max_grad_norm=1", "--steps=1")
    assert (eager["update"], deferred["update"]) == ("eager", "deferred")
    planned = [found["memory"]["host"]["planned_nbytes"] for found in (eager, deferred)]
    assert planned[0] < planned[1]  # gradients that wait for the norm


@pytest.mark.parametrize("words", [(), ("keep_offload_dir=true",)])
def test_what_lies_on_disk_is_counted_and_removed(measured, bare, words) -> None:
    found = measured(*ON_DISK, *words, "--steps=2")
    disk = found["memory"]["disk"]
    assert disk["planned_nbytes"] > 8 * found["parameters"]  # both moments
    assert 0 <= disk["measured_nbytes"] - disk["planned_nbytes"] < 2**16  # the folder's lock
    assert found["nvme_read_gbps"] > 0 and found["nvme_write_gbps"] > 0 and found["busy"]["disk"] > 0
    assert [path.name for path in bare.parent.iterdir()] == ["bare"]


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("model_name_or_path=",), 2, "model_name_or_path: found nothing, should be a valid string"),
        (("model_name_or_path=nowhere",), 2, "nowhere is not a folder"),
        (("lerning_rate=1",), 2, "unknown key lerning_rate: did you mean learning_rate?"),
        (("model_name_or_path=gpt2", "disable_dropout=true"), 2, "max_length is 32, and the model's position table"),
        (("max_host_memory=1MiB",), 3, "this run needs"),
        (("learning_rate=1e38", "max_grad_norm=0"), 1, "step 2: the loss is nan"),
        ((*ON_DISK, "max_disk_writes=8MiB", "--steps=9"), 1, "further steps would pass max_disk_writes (8.0 MiB)"),
    ],
)
def test_what_cannot_be_timed_is_one_sentence_and_a_code(slideformer, bare, words, code, expected) -> None:
    GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=16, vocab_size=99).save_pretrained(bare.parent / "gpt2")
    given = [word for word in WORDS if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    done = slideformer("bench", *given, *words, "--json")
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and expected in last and "Traceback" not in done.stderr
    assert json.loads(done.stdout) == {"error": last.removeprefix("error: "), "exit_code": code}
    assert sorted(path.name for path in bare.parent.iterdir()) == ["bare", "gpt2"]


def test_a_model_must_be_named_and_a_step_timed(slideformer, bare) -> None:
    done = slideformer("bench", "device=cpu")
    assert done.returncode == 2 and "model_name_or_path is not given" in done.stderr
    assert slideformer("bench", *WORDS, "--steps", "0").returncode == 2


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_after_a_step_and_nothing_is_left(bare, signum, code) -> None:
    command = [sys.executable, "-m", "slideformer", "bench", *WORDS, *ON_DISK, "--steps", "1000000", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen(
        command, cwd=bare.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if line.startswith("training "):
                break
        process.send_signal(signum)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == code
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"stopped by {signum.name} after step ") and "Traceback" not in errors
    assert json.loads(out) == {"status": "stopped", "error": last, "exit_code": code}
    assert [path.name for path in bare.parent.iterdir()] == ["bare"]
