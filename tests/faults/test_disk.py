"""Disks that are full, read-only, hanging or shared: what was there stays, and a sentence says what happened."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import pytest

from faults.forks import REFUSED, Child, Server
from slideformer.train import checkpoint, retention

NO_MOUNTS = "no file system may be mounted here; test_checkpoint.py refuses writes by RLIMIT_FSIZE instead"

SECOND_THOUGHT_S = 0.3
"""Nobody presses twice faster. A signal that comes while the call that the first one interrupted begins again is seen
when that call ends, which here is never."""


def complete(folder: Path) -> list[str]:
    return [path.name for _, path in retention.numbered(folder) if checkpoint.is_complete(path)]


def ended(child: Child) -> int:
    code = child.wait()
    if code == REFUSED:
        pytest.skip(NO_MOUNTS)
    return code


def test_a_disk_that_fills_up_in_a_save_keeps_the_checkpoint_before(server: Server, config, tmp_path) -> None:
    """Room for one checkpoint and a half, and somebody else takes the rest after training has begun."""
    folder = config(max_steps=6, save_steps=2, save_total_limit=1)
    (folder / "out").mkdir()
    one = 250_000
    fill = f"mount('out', 'size={4 * one}')\n"
    fill += f"""
from slideformer.train.saver import Saver
save = Saver.save
def filling(self, *args, **settings):
    save(self, *args, **settings)
    self.wait()
    with open('out/somebody_elses', 'wb') as file:
        free = os.statvfs('out').f_bavail * os.statvfs('out').f_frsize
        file.write(bytes(free - {one // 5}))
Saver.save = filling
"""
    child = server.start(folder, "train", "train.yaml", before=fill, keep="kept")
    assert ended(child) == 1
    assert "checkpoint-4 could not be written: No space left on device; the checkpoints before it are" in child.error
    assert complete(folder / "kept") == ["checkpoint-2"]
    assert not list((folder / "kept").glob(".*partial"))


def test_too_small_a_disk_is_refused_before_training(server: Server, config) -> None:
    folder = config(save_steps=1)
    (folder / "out").mkdir()
    child = server.start(folder, "train", "train.yaml", before="mount('out', 'size=200k')")
    assert ended(child) == 3
    assert child.error.startswith("the checkpoints need ") and " in out (" in child.error
    assert "step 1/" not in child.told()


@pytest.mark.parametrize(
    ("kib", "tier", "code"),
    [(700, {}, 0), (700, {"offload_dir": "out/tier"}, 3), (1100, {"offload_dir": "out/tier"}, 0)],
)
def test_a_disk_for_checkpoints_and_state_has_room_for_both_or_is_refused(
    server: Server, config, kib, tier, code
) -> None:
    shares = {"offload_weights": "nvme", "offload_optimizer": "nvme"} if tier else {}
    folder = config(save_steps=1, save_total_limit=2, **tier, **shares)
    (folder / "out").mkdir()
    child = server.start(folder, "train", "train.yaml", before=f"mount('out', 'size={kib}k')")
    assert ended(child) == code
    assert ("step 1/" in child.told()) == (code == 0)


def test_a_read_only_folder_is_refused_before_anything_is_loaded(server: Server, config) -> None:
    folder = config(save_steps=1)
    (folder / "out").mkdir()
    child = server.start(folder, "train", "train.yaml", before="mount('out', 'ro')")
    assert ended(child) == 2
    assert child.error == "output_dir out cannot be written to: Read-only file system: choose another"


def test_two_runs_in_one_folder_are_refused(server: Server, config) -> None:
    folder = config(max_steps=10**6)
    first = server.start(folder, "train", "train.yaml")
    first.until("step 2/")
    second = server.start(folder, "train", "train.yaml", log="second.txt")
    assert second.wait() == 2
    assert second.error == "another process is writing to out: wait until it has ended, or choose another output_dir"
    assert first.alive()
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    config(max_steps=1)
    assert server.start(folder, "train", "train.yaml").wait() == 0  # the kernel let go


@pytest.mark.parametrize("only", ["write", "fsync"])
def test_a_disk_that_hangs_in_a_save_is_left_by_a_second_ctrl_c(server: Server, config, only) -> None:
    folder = config(max_steps=50, save_steps=2)
    child = server.start(folder, "train", "train.yaml", FAULT_HANG="checkpoint-4", FAULT_HANG_ONLY=only)
    child.until("checkpoint-2: ")
    while not list((folder / "out").glob(".checkpoint-4.partial")):
        time.sleep(0.01)
    time.sleep(0.2)
    child.send(signal.SIGINT)
    time.sleep(0.2)
    assert child.alive()  # a disk may be slow: one Ctrl-C waits for it
    child.send(signal.SIGINT)
    assert child.wait(timeout_s=10) == 130
    assert complete(folder / "out") == ["checkpoint-2"]


WHOLE_DISK = """
from slideformer.train.saver import Saver
save = Saver.save
def hanging(self, progress):
    save(self, progress)
    if progress.step == 4:
        os.environ['FAULT_HANG'] = '/out/'
Saver.save = hanging
"""


@pytest.mark.parametrize(
    ("what", "before"),
    [("metrics.jsonl", ""), ("run.json", ""), ("timeline.json", ""), ("out/.saving", ""), ("", WHOLE_DISK)],
    ids=["line", "record", "picture", "result", "all"],  # not their names: they would be in the path of everything
)
def test_a_disk_that_hangs_anywhere_leaves_nothing_hanging_after_a_second_ctrl_c(
    server: Server, config, what, before
) -> None:
    folder = config(max_steps=10, save_steps=2, report_to="tensorboard")
    environment = {"FAULT_HANG": what} if what else {}
    child = server.start(folder, "train", "train.yaml", before=before, **environment)
    child.until("the disk hangs")
    child.send(signal.SIGINT)
    child.until("SIGINT: the run ends after this step; once more, and it ends at once")
    time.sleep(SECOND_THOUGHT_S)
    assert child.alive()
    start = time.monotonic()
    child.send(signal.SIGINT)
    assert child.wait(timeout_s=15) == 130
    assert time.monotonic() - start < 10
    assert "Traceback" not in child.told()


def test_a_disk_that_fills_up_under_the_metrics_costs_lines_and_not_the_run(server: Server, config) -> None:
    folder = config(max_steps=9)
    (folder / "out").mkdir()
    full = """
mount('out', 'size=2m')
from slideformer.train.metrics import MetricsFile
write = MetricsFile.write
def filling(self, metrics):
    if metrics['global_step'] == 3:
        with open('out/somebody_elses', 'wb', buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
    if metrics['global_step'] == 7:
        os.remove('out/somebody_elses')
    write(self, {**metrics, **{f'padding_{i}': 1.0 for i in range(500)}})  # more than a page, so that none has room
MetricsFile.write = filling
"""
    child = server.start(folder, "train", "train.yaml", before=full, keep="kept")
    assert ended(child) == 0
    told = child.told()
    assert told.count("out/metrics.jsonl cannot be written (No space left on device): lines are missing until") == 1
    steps = []
    for line in (folder / "kept/metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            steps.append(json.loads(line)["global_step"])
    assert steps[:2] == [1, 2] and steps[-3:] == [7, 8, 9] and len(steps) < 9


@pytest.mark.parametrize("only", ["pwritev", "preadv"])
def test_a_disk_tier_that_hangs_is_left_by_a_second_ctrl_c(server: Server, config, only) -> None:
    """Lanes are then at work for ever, in threads that no signal reaches."""
    folder = config(max_steps=1000, save_steps=2, offload_optimizer="nvme", offload_dir="tier")
    hangs = f"""
from slideformer.train.saver import Saver
save = Saver.save
def hanging(self, progress):
    save(self, progress)
    if progress.step == 4:
        os.environ.update(FAULT_HANG='/tier/exp_avg', FAULT_HANG_ONLY='{only}')
Saver.save = hanging
"""
    child = server.start(folder, "train", "train.yaml", before=hangs)
    child.until("the disk hangs")
    child.send(signal.SIGINT)
    child.until("once more, and it ends at once")
    time.sleep(SECOND_THOUGHT_S)
    assert child.alive()
    child.send(signal.SIGINT)
    assert child.wait(timeout_s=15) == 130
    assert "stopped by SIGINT at once" in child.told() and "Traceback" not in child.told()
    assert "checkpoint-2" in complete(folder / "out")


HANGS = {
    "samples are taken": ("slideformer.train.samples", "Samples", "take", "preadv"),
    "the result is saved": ("slideformer.train.trainer", "Trainer", "_save", "preadv"),
    "the model is loaded": ("slideformer.engine", "Engine", "write", "pwritev"),
}


@pytest.mark.parametrize("when", HANGS)
def test_a_disk_tier_that_hangs_is_left_whatever_the_main_thread_does(server: Server, config, when) -> None:
    """The main thread waits for files itself then, or for lanes that do."""
    module, owner, method, only = HANGS[when]
    samples = {"generate_steps": 4, "generate_prompts": ["3+4="], "generate_max_new_tokens": 4}
    folder = config(max_steps=4, save_steps=2, offload_weights="nvme", offload_dir="tier", **samples)
    hangs = f"""
from {module} import {owner}
whole = {owner}.{method}
def hanging(self, *args, **settings):
    os.environ.update(FAULT_HANG='/tier/weight', FAULT_HANG_ONLY='{only}')
    return whole(self, *args, **settings)
{owner}.{method} = hanging
"""
    child = server.start(folder, "train", "train.yaml", before=hangs)
    child.until("the disk hangs")
    child.send(signal.SIGINT)
    child.until("once more, and it ends at once")
    time.sleep(SECOND_THOUGHT_S)
    child.send(signal.SIGINT)
    assert child.wait(timeout_s=15) == 130
    assert "Traceback" not in child.told()
