"""What a GPU's matrix units can do at most, for `mfu`: the share of that which training's own products use."""

from __future__ import annotations

import torch

from slideformer.device import Device
from slideformer.train.hardware import gpus

KNOWN: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.05),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)
"""Words of a GPU's name -> TFLOP/s of dense bf16 products with fp32 sums, by NVIDIA's data sheets. The first that fits;
of a GeForce the whole end of the name, since a Ti or a laptop's is another."""

MEASURED_DIM = 8192
"""Of the square matrices that are multiplied where a GPU is not in the table: 800 TFLOP/s on an H200, 81% of its peak
(2026-11-30), so a share of a measured rate is a little higher than one of a data sheet's."""


def peak_tflops(device: Device, dtype: torch.dtype) -> tuple[float, str] | None:
    """(TFLOP/s, "known" or "measured") of bf16 on a GPU; None for everything else, where nobody says a peak.

    Measures for a second at most, with 400 MB of device memory: before it is full.
    """
    if device.kind != "cuda" or dtype is not torch.bfloat16:
        return None
    known = known_tflops(gpus())
    if known is not None:
        return known, "known"
    a, b = (torch.randn(MEASURED_DIM, MEASURED_DIM, dtype=dtype, device=device.torch_device) for _ in range(2))
    seconds = device.measure(lambda: a @ b).seconds
    return 2 * MEASURED_DIM**3 / seconds / 1e12, "measured"


def known_tflops(names: list[str]) -> float | None:
    """Of the first GPU (lines of `gpus`), if all are alike and it is one of KNOWN."""
    models = {name.partition(",")[0] for name in names}
    if len(models) != 1:
        return None
    words = models.pop()
    return next((tflops for part, tflops in KNOWN if _has(words, part)), None)


def _has(name: str, part: str) -> bool:
    """As words: an L40 is no L4."""
    words = f" {name.replace('-', ' ')} "
    return words.endswith(f" {part} ") if part.startswith("RTX") else f" {part} " in words
