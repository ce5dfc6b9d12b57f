"""A disk that errs, fills up or is changed under a run whose state lies there: one sentence in time, no hang, and what
was saved before can be gone on from."""

from __future__ import annotations

import errno
import json
import re
import signal
import time
from pathlib import Path

import pytest

from faults.forks import Server, write_config
from slideformer.train import checkpoint, retention

TIER = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_activations": "nvme", "offload_dir": "tier"}
RUN = {"max_steps": 6, "save_steps": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
AFTER_TWO = """
import time
from slideformer.train.saver import Saver
save = Saver.save
def bad(self, progress):
    save(self, progress)
    if progress.step == 2:
        self.wait()
        open('broke', 'w').write(str(time.time()))
        {fault}
Saver.save = bad
"""
ERRS = "os.environ.update(FAULT_ERROR='{number}', FAULT_ERROR_IN='/tier/{file}')"
CHANGED = """
        for path in __import__('pathlib').Path('tier').glob('{file}'):
            with path.open('r+b') as file:
                {change}
"""
FLIP = "old = file.read(); file.seek(0); file.write(bytes(b ^ 1 for b in old)); file.flush(); os.fsync(file.fileno())"


def complete(folder: Path) -> list[str]:
    return [path.name for _, path in retention.numbered(folder) if checkpoint.is_complete(path)]


def metrics_of(folder: Path) -> list[dict]:
    """Of steps."""
    lines = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def unbroken(server: Server, toy, tmp_path_factory) -> dict[str, bytes]:
    """The files of the last checkpoint of a run that lies in memory and meets nothing."""
    folder = write_config(tmp_path_factory.mktemp("whole"), *toy, **RUN).parent
    assert server.start(folder, "train", "train.yaml").wait() == 0
    return {file.name: file.read_bytes() for file in (folder / "out" / "checkpoint-6").glob("*.safetensors")}


@pytest.mark.parametrize(
    ("fault", "lane", "says"),
    [
        (ERRS.format(number=errno.EIO, file="exp_avg_sq"), "disk_(read|write)", "could not be .*: Input/output error"),
        (ERRS.format(number=errno.ENOSPC, file="residual"), "disk_(read|write|feed)", "could not be .*: No space left"),
        (ERRS.format(number=errno.EIO, file="saved"), "disk_(spill|fetch)", "could not be .*: Input/output error"),
        (CHANGED.format(file="weight", change=FLIP), "disk_(feed|read)", "is not what this run wrote"),
        (CHANGED.format(file="exp_avg", change="file.truncate(4096)"), "disk_read", "the file was cut to "),
    ],
    ids=["error", "full", "saved", "changed", "cut"],
)
def test_a_disk_that_fails_in_a_step_ends_the_run_and_the_checkpoint_before_is_gone_on_from(
    server: Server, config, unbroken, fault, lane, says
) -> None:
    folder = config(**RUN, **TIER)
    child = server.start(folder, "train", "train.yaml", before=AFTER_TWO.format(fault=fault))
    assert child.wait(timeout_s=30) == 1
    assert time.time() - float((folder / "broke").read_text()) < 5  # a second, and the end of a process
    told = child.error
    assert re.search(rf"\(lane {lane}\)|lane {lane}\b", told), told
    assert re.search(rf"extent \d+ of tier/\w+ .*{says}", told), told
    assert complete(folder / "out") == ["checkpoint-2"]
    assert not (folder / "tier").exists()
    config(resume_from_checkpoint="auto", **RUN, **TIER)
    assert server.start(folder, "train", "train.yaml").wait() == 0
    ended = {file.name: file.read_bytes() for file in (folder / "out" / "checkpoint-6").glob("*.safetensors")}
    assert ended == unbroken


def test_what_a_killed_run_left_is_told_at_the_next_start(server: Server, config) -> None:
    folder = config(max_steps=10**6, **TIER)
    child = server.start(folder, "train", "train.yaml")
    child.until("step 2/")
    second = server.start(folder, "train", "train.yaml", "output_dir=other", log="second.txt")
    assert second.wait() == 2
    assert re.match(r"offload_dir tier is used by a run that is at work \(process \d+ on .*\): wait for", second.error)
    assert child.alive()
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    left = sorted(path.name for path in (folder / "tier").iterdir())
    third = server.start(folder, "train", "train.yaml")
    assert third.wait() == 2
    assert re.match(r"offload_dir tier holds 0.0\d GiB of a run that was killed \(process", third.error)
    assert third.error.endswith(
        "nothing goes on from the run's files (a checkpoint has its own): remove them with "
        f"`rm -r {folder}/tier`, set reuse_offload_dir: true, or choose another"
    )
    assert sorted(path.name for path in (folder / "tier").iterdir()) == left, "nothing of it is removed"


def test_a_killed_run_that_is_started_again_as_it_was_goes_on_to_the_same_bits(
    server: Server, config, unbroken
) -> None:
    """kill -9 in a step, twice, and the same command each time: no hand removes anything."""
    folder = config(resume_from_checkpoint="auto", reuse_offload_dir=True, **RUN, **TIER)
    wait = "import time\nfrom slideformer.train.loop import Loop\nsubmit = Loop._submit\n"
    wait += "def slow(self, index, waiting):\n    time.sleep({s} if index == {step} else 0)\n"
    wait += "    return submit(self, index, waiting)\nLoop._submit = slow\n"
    for step in (3, 5):
        child = server.start(folder, "train", "train.yaml", before=wait.format(s=60, step=step))
        child.until(f"step {step - 1}/")
        while f"checkpoint-{step - 1}" not in complete(folder / "out"):
            assert child.alive()
            time.sleep(0.05)
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert {"weight", "exp_avg", "saved"} <= {path.name for path in (folder / "tier").iterdir()}
    killed = metrics_of(folder)
    last = server.start(folder, "train", "train.yaml", log="last.txt")
    assert last.wait() == 0
    written = [line["nvme_written_gb"] for line in metrics_of(folder)]
    assert written[-1] > max(line["nvme_written_gb"] for line in killed) > 0, "counted over all starts"
    assert sorted(written) == written and len(written) == 6
    assert "offload_dir tier is taken over: " in (folder / "last.txt").read_text()
    ended = {file.name: file.read_bytes() for file in (folder / "out" / "checkpoint-6").glob("*.safetensors")}
    assert ended == unbroken
    assert not (folder / "tier").exists()
