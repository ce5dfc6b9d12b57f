"""A machine with too little memory, and one whose clock somebody sets."""

from __future__ import annotations

import json
import os

import pytest

from faults.campaign import metrics_of, state_of
from faults.forks import REFUSED, Server

LIMITED = """
import gc
gc.collect()
used = int(open('/proc/self/statm').read().split()[{field}]) * resource.getpagesize()
limit = used + {room} * 2**20
resource.setrlimit(resource.{name}, (limit, limit))
"""
CGROUP = """
import glob
groups = [line.split(':', 2) for line in open('/proc/self/cgroup').read().splitlines()]
two = os.path.exists('/sys/fs/cgroup/cgroup.controllers')
own = next((path for _, kinds, path in groups if kinds == '' or 'memory' in kinds.split(',')), '/').strip('/')
root = '/sys/fs/cgroup' if two else '/sys/fs/cgroup/memory'
parent = os.path.join(root, own) if os.path.isdir(os.path.join(root, own)) else root
group = os.path.join(parent, f'slideformer-test-{os.getpid()}')
os.mkdir(group)
print('group', group, flush=True)
with open(os.path.join(group, 'memory.max' if two else 'memory.limit_in_bytes'), 'w') as file:
    file.write(str(1200 * 2**20))
with open(os.path.join(group, 'cgroup.procs'), 'w') as file:
    file.write(str(os.getpid()))
"""


@pytest.mark.parametrize(("name", "field"), [("RLIMIT_AS", 0), ("RLIMIT_DATA", 5)])
def test_a_host_that_refuses_memory_ends_with_3_and_what_was_asked_for(server: Server, config, name, field) -> None:
    """Buffers of 1 GiB and more, where the process may have another 500 MiB."""
    folder = config(max_length=2**16, per_device_train_batch_size=256)
    child = server.start(folder, "train", "train.yaml", before=LIMITED.format(name=name, field=field, room=500))
    assert child.wait() == 3, child.told()
    assert "GiB" in child.error or "MiB" in child.error
    assert "step 1/" not in child.told()


def test_a_clock_that_jumps_by_years_changes_no_number(server: Server, config) -> None:
    settings = {"max_steps": 8, "save_steps": 3, "val_size": 4, "eval_strategy": "steps", "eval_steps": 3}
    straight = config(at="straight", **settings)
    jumping = config(at="jumping", **settings)
    assert server.start(straight, "train", "train.yaml").wait() == 0
    child = server.start(jumping, "train", "train.yaml", FAULT_CLOCK="1")
    assert child.wait() == 0, child.told()
    for step in (6, 8):
        assert state_of(straight / f"out/checkpoint-{step}") == state_of(jumping / f"out/checkpoint-{step}")
    assert metrics_of(straight / "out") == metrics_of(jumping / "out")
    run = json.loads((jumping / "out/run.json").read_text())
    years = {run[name][:4] for name in ("started", "written")}
    assert years != {json.loads((straight / "out/run.json").read_text())["started"][:4]}  # it did jump
    for line in (jumping / "out/metrics.jsonl").read_text().splitlines():
        times = [value for name, value in json.loads(line).items() if name in ("step_time", "eta_seconds")]
        assert all(0 <= value < 1000 for value in times)


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_numbers_that_run_away_at_any_step_stop_the_run_before_the_next_checkpoint(
    server: Server, config, step, update
) -> None:
    """A rate that overflows is given to one step; the checkpoint before it is whole, and the run goes on from it."""
    wild = f"""
from slideformer.engine import Engine
steps, plain = [0], Engine.step
def step(self, batch, *, lr):
    steps[0] += 1
    return plain(self, batch, lr=1e38 if steps[0] == {step} else lr)
Engine.step = step
"""
    settings = {"update": update, "max_grad_norm": 0, "max_steps": 9, "save_steps": 1, "save_total_limit": None}
    folder = config(at="wild", resume_from_checkpoint="auto", lr_scheduler_type="constant", **settings)
    child = server.start(folder, "train", "train.yaml", before=wild)
    assert child.wait() == 1
    assert f"step {step + 1}: " in child.error and "its rows: " in child.error
    done = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    assert done[-1] == f"checkpoint-{step}"
    assert not list((folder / "out").glob(".checkpoint-*"))


def test_a_container_with_too_little_memory_is_told_before_anything_is_allocated(server: Server, config) -> None:
    folder = config(max_length=2**16, per_device_train_batch_size=256)
    child = server.start(folder, "train", "train.yaml", before=CGROUP)
    code = child.wait()
    for line in child.told().splitlines():
        if line.startswith("group "):
            os.rmdir(line.removeprefix("group "))
    if code == REFUSED:
        pytest.skip("no group can be made here; tests/memory/test_budget.py reads limits from files")
    assert code == 3, child.told()
    assert "this container (its memory limit)" in child.error
