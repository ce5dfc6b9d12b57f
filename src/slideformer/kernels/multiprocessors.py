"""How many multiprocessors a GPU has: what launches that fill it exactly are computed from."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU, by Triton's own driver; 1 on the CPU, where the interpreter runs one program after another."""
    if device.type == "cpu":
        return 1
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["multiprocessor_count"]
