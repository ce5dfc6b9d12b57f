"""Memory for the tests of the disk: it starts on a page, or so many bytes behind one."""

from __future__ import annotations

import mmap

import torch

BLOCK = 4 * 4096


def on_a_page(nbytes: int, *, off: int = 0) -> torch.Tensor:
    """Zeros that start `off` bytes after the start of a page."""
    return torch.frombuffer(mmap.mmap(-1, nbytes + off + 1), dtype=torch.uint8)[off : off + nbytes]


def noise(nbytes: int, seed: int, *, off: int = 0) -> torch.Tensor:
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return on_a_page(nbytes, off=off).copy_(made)
