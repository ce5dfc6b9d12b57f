"""The state on the host: both planes of every master weight, and the moments of every trained one.

12 bytes a trained parameter (2 + 2 + 4 + 4). The weight plane is page-locked and is itself what is uploaded. A frozen
parameter has no moments, and under bf16 compute no residual either: 2 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slideformer.device import Device
from slideformer.layout import Layout
from slideformer.memory.host import Arena, arena_nbytes
from slideformer.native import HostKernels

PIECE_NUMEL = 1 << 22
"""Elements split or joined at a time when weights are read or written, so that temporaries stay small (16 MiB)."""


class Moments(NamedTuple):
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def state_sizes(layout: Layout, *, keep_residual: bool) -> dict[str, list[tuple[int, torch.dtype]]]:
    """Lengths and dtypes of every plane and moment, per unit. keep_residual: see `State`."""
    units = layout.units
    trained = [(u.train_numel, torch.float32) for u in units]
    return {
        "weights": [(u.numel, torch.bfloat16) for u in units],
        "residuals": [(u.numel if keep_residual else u.train_numel, torch.int16) for u in units],
        "first moments": trained,
        "second moments": trained,
    }


def state_nbytes(layout: Layout, *, keep_residual: bool) -> dict[str, int]:
    """Bytes of each arena of a `State`."""
    return {name: arena_nbytes(sizes) for name, sizes in state_sizes(layout, keep_residual=keep_residual).items()}


class State:
    """Flat host tensors per unit: weight bf16 [numel], residual int16, exp_avg and exp_avg_sq fp32 [train_numel]."""

    def __init__(self, layout: Layout, device: Device, kernels: HostKernels, *, keep_residual: bool) -> None:
        """keep_residual: frozen parameters keep their residual plane too (fp32 compute reads it)."""
        self.layout, self._kernels = layout, kernels
        sizes = state_sizes(layout, keep_residual=keep_residual)
        self.arenas = {name: Arena.of(needed, name) for name, needed in sizes.items()}
        planes = {name: [self.arenas[name].take(*one) for one in needed] for name, needed in sizes.items()}
        self.weight, self.residual = planes["weights"], planes["residuals"]
        self.moments = [Moments(*pair) for pair in zip(planes["first moments"], planes["second moments"], strict=True)]
        for moments in self.moments:  # touched now, so that no step pays for the pages
            moments.exp_avg.zero_()
            moments.exp_avg_sq.zero_()
        self.weights_locked = self.arenas["weights"].page_lock(device)
        if keep_residual:
            self.arenas["residuals"].page_lock(device)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arenas.values())

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        """Set master weights [offset, offset + len) of a unit. values: 1-D, any float dtype, host."""
        for start in range(0, values.numel(), PIECE_NUMEL):
            piece = values[start : start + PIECE_NUMEL].float().contiguous()
            begin, end = offset + start, offset + start + piece.numel()
            residual = self.residual[unit][begin:end]
            if residual.numel() == piece.numel():
                self._kernels.split(piece, self.weight[unit][begin:end], residual)
            else:  # the frozen end of the unit has no residual plane
                scratch = torch.empty(piece.numel(), dtype=torch.int16)
                self._kernels.split(piece, self.weight[unit][begin:end], scratch)
                residual.copy_(scratch[: residual.numel()])

    def read(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Master weights [start, stop) of a unit as a new fp32 [stop - start]. Where there is no residual: the bf16."""
        out = self.weight[unit][start:stop].float()
        with_residual = min(stop, self.residual[unit].numel())
        if with_residual > start:
            planes = self.weight[unit][start:with_residual], self.residual[unit][start:with_residual]
            self._kernels.join(*planes, out[: with_residual - start])
        return out
