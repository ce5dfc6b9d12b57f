"""The CPU device keeps the contract, and the promises that only tests need: jitter and poison."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from device.contract import *  # noqa: F403
from slideformer.device import Device, open_device
from slideformer.device.cpu import CpuDevice
from slideformer.device.lanes import Fault, ThreadLane
from slideformer.errors import BadInput


@pytest.fixture(params=[0.0, 1e-4], ids=["", "jitter"])
def open_another(request):
    return lambda: CpuDevice(jitter_s=request.param)


@pytest.fixture
def device(open_another):
    with open_another() as opened:
        yield opened


def delays(seed: int, monkeypatch, jitter_s: float = 1e-3) -> dict[str, list[float]]:
    """What each lane sleeps before its pieces of work."""
    found: dict[str, list[float]] = {}
    monkeypatch.setattr(time, "sleep", lambda s: found.setdefault(threading.current_thread().name, []).append(s))
    with CpuDevice(jitter_s=jitter_s, seed=seed) as device:
        lanes = [device.lane(name, host=True) for name in ("one", "two")]
        for _ in range(50):
            for lane in lanes:
                lane.run(lambda: None)
        device.synchronize()
    monkeypatch.undo()
    return found


def test_jitter_is_reproducible_by_seed_and_differs_between_lanes(monkeypatch):
    first, again, other = (delays(seed, monkeypatch) for seed in (1, 1, 2))
    assert first == again != other
    one, two = first.values()
    assert len(one) == len(two) == 51 and one != two
    assert 0 <= min(one + two) and max(one + two) < 1e-3
    assert max(one) > 5 * sorted(one)[25], "mostly short, sometimes long"


def test_without_jitter_nothing_is_delayed(monkeypatch):
    assert delays(1, monkeypatch, jitter_s=0.0) == {}


def test_the_cpu_device_is_chosen_by_name():
    with open_device("cpu") as device:
        assert isinstance(device, CpuDevice) and device.kind == "cpu" and not device.poisons
    with pytest.raises(BadInput, match="device is 'gpu', must be auto, cpu or cuda"):
        open_device("gpu")


def test_a_missing_gpu_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="torch sees no CUDA device here; use device: cpu"):
        open_device("cuda")
    with open_device("auto") as device:
        assert device.kind == "cpu"


def test_the_backend_satisfies_the_protocol():
    device: Device = CpuDevice(poison=True)
    assert device.poisons and device.failure is None
    device.close()


def test_a_lane_that_stands_back_does_so_alone() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []
    lane, before = ThreadLane("nice", Fault(), nice=3), niceness()
    lane.run(lambda: found.append(niceness())).wait()
    lane.close()
    assert found == [3]
    assert niceness() == before
