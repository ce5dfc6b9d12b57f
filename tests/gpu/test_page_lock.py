"""Host memory that the driver will not lock: told once, and the run is the same. And what a limit on locked memory
(`ulimit -l`) has to do with it: nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from gpu.test_disk_parity import deterministic, outcome  # noqa: F401 a fixture
from slideformer.device.cuda import CudaDevice
from slideformer.memory import Arena

TOLD = "of host memory could not be page-locked ("


class RefusingDevice(CudaDevice):
    """Whose driver refuses all memory, by what it refuses: what is locked already. Then nothing of it is locked."""

    def page_lock(self, tensor: torch.Tensor) -> bool:
        if tensor.nbytes == 0:
            return super().page_lock(tensor)
        runtime = torch.cuda.cudart()
        assert int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0
        try:
            return super().page_lock(tensor)
        finally:
            assert int(runtime.cudaHostUnregister(tensor.data_ptr())) == 0


def test_a_refusal_is_told_once_and_no_later_launch_is_blamed_for_it(caplog):
    with RefusingDevice() as device:
        arenas = [Arena(nbytes, "test") for nbytes in (4 << 20, 8 << 20)]
        for arena in arenas:
            assert not arena.page_lock(device)
            assert float(torch.ones(5, device=device.torch_device).sum()) == 5.0
        assert device.page_locked_nbytes == 0
        there = device.empty(1 << 20, torch.float32)
        lane = device.lane("copies", host=False)
        here = arenas[0].take(1 << 20, torch.float32)
        for seed in range(20):
            kept = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
            here.copy_(kept)
            lane.run(lambda: there.copy_(here, non_blocking=True)).wait()
            here.zero_()
            lane.run(lambda: here.copy_(there, non_blocking=True)).wait()
            assert torch.equal(here, kept)
        for arena in arenas:
            arena.page_unlock(device)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and TOLD in warnings[0].getMessage() and "already" in warnings[0].getMessage()


@pytest.mark.parametrize("program", [{"update": "eager", "max_grad_norm": 0.0}, {"update": "deferred"}], ids=str)
def test_a_run_without_page_locked_memory_is_the_run(program, caplog):
    with CudaDevice() as device:
        losses, planes = outcome(device, **program)
    assert TOLD not in caplog.text
    with RefusingDevice() as device:
        found, other = outcome(device, **program)
    assert found == losses
    assert all(map(torch.equal, planes, other))
    assert sum(TOLD in record.getMessage() for record in caplog.records if record.levelname == "WARNING") == 1


CHILD = """
    import ctypes, mmap, resource, sys
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 1 << 30)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == 65536
    refused = libc.mlock(address, ctypes.c_size_t(1 << 30)) != 0
    import torch
    from slideformer.device.cuda import CudaDevice
    with CudaDevice() as device:
        locked = device.page_lock(torch.frombuffer(memory, dtype=torch.uint8))
    print(refused, locked)
"""
START = """
    import ctypes, os, resource, sys
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK: root's right to lock all the same
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_a_limit_on_locked_memory_does_not_bind_the_driver():
    """A process that `mlock` refuses a GiB has it page-locked."""
    command = [sys.executable, "-c", textwrap.dedent(START), textwrap.dedent(CHILD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
