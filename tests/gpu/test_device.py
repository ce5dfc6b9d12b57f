"""The CUDA device keeps the contract that the CPU device keeps in tests/device."""

from __future__ import annotations

import pytest
import torch

from device.contract import *  # noqa: F403
from slideformer.device.cuda import CudaDevice
from slideformer.errors import DoesNotFit
from slideformer.memory import Arena


@pytest.fixture
def open_another():
    return CudaDevice


@pytest.fixture
def device():
    with CudaDevice() as opened:
        yield opened


def test_a_stream_waits_for_a_stream_not_for_its_launcher(device):
    """The second stream reads what the first writes only after a long piece of work."""
    first, second = device.lane("first", host=False), device.lane("second", host=False)
    a = torch.ones(4096, 4096, device=device.torch_device)
    result = device.empty(1, torch.float32)

    def long_work() -> None:
        torch.cuda._sleep(200_000_000)
        result.copy_((a @ a)[0, :1])

    written = first.run(long_work)
    second.wait(written)
    read = device.empty(1, torch.float32)
    done = second.run(lambda: read.copy_(result))
    assert not done.completed
    done.wait()
    assert float(read) == 4096.0


def test_a_host_lane_waits_for_a_stream(device):
    stream, host = device.lane("stream", host=False), device.lane("host", host=True)
    source = device.empty(1 << 20, torch.float32)
    arena = Arena(4 << 20, "test")
    target = arena.take(1 << 20, torch.float32)
    assert arena.page_lock(device)
    seen: list[float] = []

    def copy() -> None:
        torch.cuda._sleep(100_000_000)
        source.fill_(2.0)
        target.copy_(source, non_blocking=True)

    host.wait(stream.run(copy))
    host.run(lambda: seen.append(float(target.sum()))).wait()
    assert seen == [2.0 * (1 << 20)]


def test_more_than_there_is_does_not_fit(device):
    with pytest.raises(DoesNotFit, match="the GPU has no .* GiB left for a buffer .* are free"):
        device.empty(1 << 42, torch.float32)
