"""Bytes and updates are counted where they happen."""

from __future__ import annotations

import threading

import pytest
import torch

from slideformer.native import Planes, TorchKernels, load
from slideformer.optim import Hyper
from traffic import Traffic, UpdateCount, copies, our_updates, read_record, torch_updates


def event(name: str, start: float, length: float, **args: object) -> dict:
    kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "args": args}


def test_a_record_of_the_driver_gives_bytes_by_direction_and_busy_shares():
    traffic = Traffic()
    events = [
        {"ph": "M", "name": "process_name"},
        event("gemm", 0, 50),
        event("gemm", 25, 50),  # runs beside the first: the union counts
        event("Memcpy HtoD (Pinned -> Device)", 10, 20, bytes=1000),
        event("Memcpy HtoD (Pageable -> Device)", 80, 20, bytes=24),
        event("Memcpy DtoH (Device -> Pinned)", 60, 10, bytes=500),
        event("Memcpy DtoD (Device -> Device)", 70, 5, bytes=4096),
    ]
    read_record(events, traffic)
    assert (traffic.up, traffic.down) == (1024, 500)
    assert traffic.busy == {"compute": 0.75, "upload": 0.4, "download": 0.1}


def test_copies_of_the_transfer_lanes_are_counted_and_others_are_not():
    source, target = torch.ones(8), torch.empty(8)
    with copies(cuda=False) as traffic:
        for lane in ("upload", "fetch", "download", "spill", "compute"):
            thread = threading.Thread(target=target.copy_, args=(source,), name=f"slideformer-{lane}")
            thread.start()
            thread.join()
        target.copy_(source)
    assert (traffic.up, traffic.down) == (2 * 32, 2 * 32)
    assert torch.Tensor.copy_ is torch._C.TensorBase.copy_


@pytest.fixture(params=["native", "torch"])
def kernels(request):
    found = load(1) if request.param == "native" else TorchKernels()
    yield found
    found.close()


def state(numel: int) -> Planes:
    return Planes(
        torch.zeros(numel, dtype=torch.bfloat16),
        torch.zeros(numel, dtype=torch.int16),
        torch.zeros(numel),
        torch.zeros(numel),
    )


def test_a_parameter_counts_once_however_often_its_state_is_written(kernels):
    hyper, planes, spare = Hyper(1e-3, step=1), state(12), state(12)
    weight, residual, exp_avg, exp_avg_sq = planes
    with our_updates(kernels) as count:
        kernels.update(weight, residual, None, exp_avg, exp_avg_sq, hyper, out=spare)  # ahead
        kernels.update(weight, residual, None, exp_avg, exp_avg_sq, hyper)  # and again, clipped
        assert count.numel == 12
        table = [plane.view(-1, 3) for plane in state(12)]
        kernels.update_rows(*table, torch.tensor([0, 2]), None, None, hyper)
        kernels.update_rows(*table, torch.tensor([2, 3]), None, None, hyper)
    assert count.numel == 12 + 3 * 3
    kernels.update(*state(5)[:2], None, *state(5)[2:], hyper)  # no longer counted
    assert count.numel == 21


def test_an_optimizer_of_torch_counts_the_parameters_that_have_a_gradient():
    given, idle = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))
    given.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([given, idle])
    with torch_updates([optimizer]) as count:
        optimizer.step()
    optimizer.step()
    assert isinstance(count, UpdateCount) and count.numel == 3
