"""The peak that mfu is a share of: a data sheet's or measured, never made up."""

from __future__ import annotations

import pytest
import torch

from slideformer.device.cpu import CpuDevice
from slideformer.train import peak
from slideformer.train.peak import known_tflops, peak_tflops


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["NVIDIA H200, 143771 MiB, 570.1"], 989.4),
        (["NVIDIA H100 PCIe, 81559 MiB, 570.1"], 756.0),
        (["NVIDIA H100 80GB HBM3, 81559 MiB, 570.1"] * 2, 989.4),
        (["NVIDIA A100-SXM4-80GB, 81920 MiB, 570.1"], 312.0),
        (["NVIDIA GeForce RTX 4090, 24564 MiB, 570.1"], 165.2),
        (["NVIDIA GeForce RTX 4090 Laptop GPU, 16376 MiB, 570.1"], None),
        (["NVIDIA L4, 23034 MiB, 570.1"], 121.0),
        (["NVIDIA L40, 46068 MiB, 570.1"], None),
        (["NVIDIA GeForce GTX 1080, 8192 MiB, 570.1"], None),
        (["NVIDIA L4, 1 MiB, 1", "NVIDIA H200, 1 MiB, 1"], None),
        ([], None),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(names: list[str], expected: float | None):
    assert known_tflops(names) == expected


class Gpu(CpuDevice):
    """A device that says it is a GPU and measures on the CPU."""

    kind = "cuda"


def test_an_unknown_gpu_is_measured_and_anything_else_has_no_peak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peak, "MEASURED_DIM", 64)
    monkeypatch.setattr(peak, "gpus", list)
    with Gpu() as gpu, CpuDevice() as cpu:
        found = peak_tflops(gpu, torch.bfloat16)
        assert found is not None and found[0] > 0 and found[1] == "measured"
        assert peak_tflops(gpu, torch.float32) is None
        assert peak_tflops(cpu, torch.bfloat16) is None
