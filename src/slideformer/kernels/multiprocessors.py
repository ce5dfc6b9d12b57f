"""What a GPU has of what launches are cut to: multiprocessors, and the shared memory of one program."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def _properties(device: torch.device) -> dict[str, int]:
    return triton.runtime.driver.active.utils.get_device_properties(device.index)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU, by Triton's own driver; 1 on the CPU, where the interpreter runs one program after another."""
    return 1 if device.type == "cpu" else _properties(device)["multiprocessor_count"]


def shared_nbytes(device: torch.device) -> int:
    """Most shared memory of a program; on the CPU that of the smallest GPUs, so that tests take the same paths."""
    return 1 << 16 if device.type == "cpu" else _properties(device)["max_shared_mem"]
