"""torch's backward as the lanes run it: in the thread that asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gradients(out: torch.Tensor, leaves: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Of `leaves`, in their dtype, shape and device; grad: of `out`, in its shape. An unused leaf is an error of
    torch's, never a silent zero.

    Not in torch's own thread for a device: where cores are short that lets go of the gradients some time after they
    have been handed over, with the next block already at work (up to 0.2 GiB at the peak of some steps; 3B shape,
    32 x 1024, H200, 2026-12-01), and its matrix library has a workspace of its own.
    """
    with torch.autograd.set_multithreading_enabled(False):
        return list(torch.autograd.grad(out, list(leaves), grad))
