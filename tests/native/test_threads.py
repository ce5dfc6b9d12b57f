"""The pool: its size, two callers at once, the end, a fork. Scripts run in a process of their own where they count or
end threads."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from native.states import HYPER, State, assert_same_bits, ordinary
from slideformer.native import available_cpus, load
from slideformer.optim import reference_update

COUNT = """
import glob
from pathlib import Path
def workers():
    return sum(Path(task).read_text() == "sf-native\\n" for task in glob.glob("/proc/self/task/*/comm"))
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_launchers_omp_num_threads_does_not_change_the_thread_count():
    script = COUNT + "from slideformer.native import load; k = load(); print(k.threads, workers() + 1)"
    assert run(script, OMP_NUM_THREADS="1") == f"{available_cpus()} {available_cpus()}"


def test_closing_ends_the_threads_and_later_calls_are_refused():
    script = COUNT + "from slideformer.native import load; k = load(4); print(workers()); k.close(); print(workers())"
    assert run(script).split() == ["3", "0"]
    kernels = load(2)
    kernels.close()
    kernels.close()
    with pytest.raises(RuntimeError, match="these kernels are closed"):
        kernels.split(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int16))


def test_forgotten_kernels_end_with_their_object_and_with_the_process():
    script = COUNT + "from slideformer.native import load; load(4); print(workers()); k = load(4); print(workers())"
    assert run(script).split() == ["0", "3"]


def test_callers_at_the_same_time_each_get_their_own_result(generator: torch.Generator):
    num_callers, num_steps = 4, 8
    states = [State(60_000 + i, torch.bfloat16, ordinary, generator) for i in range(num_callers)]
    expected = [state.clone() for state in states]
    for state in expected:
        for _ in range(num_steps):
            reference_update(*state.args(), HYPER)
    with load(3) as kernels:
        together = threading.Barrier(num_callers)

        def work(state: State) -> None:
            together.wait(timeout=30)
            for _ in range(num_steps):
                kernels.update(*state.args(), HYPER)

        callers = [threading.Thread(target=work, args=(state,)) for state in states]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=60)
            assert not caller.is_alive()
    for found, wanted in zip(states, expected, strict=True):
        assert_same_bits(found, wanted)


def test_the_callers_own_denormals_are_left_alone(generator: torch.Generator):
    state = State(20_000, torch.bfloat16, ordinary, generator)
    with load(2) as kernels:
        kernels.update(*state.args(), HYPER)
    assert (torch.tensor([1e-40]) * 0.5).item() != 0
    assert torch.tensor([1e-40]).item() * 0.5 != 0


def test_a_forked_child_still_computes_the_same():
    script = """
import os, torch
from slideformer.native import load
from slideformer.optim import Hyper
def updated(kernels):
    torch.manual_seed(0)
    planes = [torch.randn(50_000).bfloat16(), torch.zeros(50_000, dtype=torch.int16)]
    moments = [torch.randn(50_000), torch.rand(50_000)]
    kernels.update(*planes, torch.randn(50_000), *moments, Hyper(1e-3))
    return planes[1].clone()
kernels = load(4)
before = updated(kernels)
child = os.fork()
if child == 0:
    same = torch.equal(updated(kernels), before)
    kernels.close()
    os._exit(0 if same else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(torch.equal(updated(kernels), before))
"""
    assert run(script, OMP_NUM_THREADS="1") == "True"
