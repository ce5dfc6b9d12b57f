"""A device that will not lock host memory: the run and its text are the same. tests/gpu has the driver refuse."""

from __future__ import annotations

import torch

from engine.toys import DEFERRED, engine_on, repeated, run_engine, toy_batch, toy_decoder, toy_options
from slideformer.device.cpu import CpuDevice
from slideformer.model.sampling import Sampling
from slideformer.train.measure import page_lock_rate


class RefusingDevice(CpuDevice):
    """Locks nothing; counts what it was asked for, and has to take nothing back."""

    asked = 0

    def page_lock(self, tensor: torch.Tensor) -> bool:
        self.asked += 1
        return False


def test_a_run_goes_on_where_no_host_memory_can_be_locked():
    options = toy_options(micro_batches=2, saved_on_device=1, ahead=(1, 2), **DEFERRED)
    outcomes = []
    for device in (CpuDevice(), RefusingDevice()):
        with engine_on(toy_decoder(), options, device) as engine:
            found = run_engine(engine, repeated(toy_batch(2), 3))
            outcomes.append((found, engine.generate([[7, 3]], Sampling(max_new_tokens=4)).tokens))
    assert device.asked > 4, "weights and residuals, also of second copies, buffers, keys and values"
    assert outcomes[0] == outcomes[1]


def test_a_refusal_has_no_rate():
    with RefusingDevice() as device:
        assert page_lock_rate(device, 4096) is None
    with CpuDevice() as device:
        assert page_lock_rate(device, 4096) > 0
