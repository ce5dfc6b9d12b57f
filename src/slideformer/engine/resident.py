"""Updates of resident units: on the device, where their state and gradients are, in the lane of the model's own work.

The verdict is a value of the host that the launcher waits for; nothing here asks the device anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slideformer.engine.reach import Reach
from slideformer.engine.run import Run, Verdict
from slideformer.kernels.device_update import update_
from slideformer.layout import Layout
from slideformer.memory import Home
from slideformer.schedule import Op, OpKind


class ResidentUpdates:
    """Actions of the compute lane that write state."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def table(self) -> dict[OpKind, Callable[[Reach, Run, Op], None]]:
        return {OpKind.UPDATE_RESIDENT: self.update, OpKind.UPDATE_RESIDENT_TABLE: self.update_table}

    @torch.no_grad()
    def update(self, reach: Reach, run: Run, op: Op) -> None:
        verdict = self._permitted(reach, run)
        if verdict is not None:
            unit, home = self.layout.units[op.unit], reach.home("home")
            _update(home, slice(0, unit.train_numel), reach["grad"], verdict, decay_numel=unit.decay_numel)
            home.refresh()

    @torch.no_grad()
    def update_table(self, reach: Reach, run: Run, op: Op) -> None:
        """Tied, the touched rows' gradient replaces the part of theirs that the head gave. Untied, it is all there is,
        and the gradient is laid out one tile at a time."""
        verdict = self._permitted(reach, run)
        if verdict is None:
            return
        unit, home = self.layout.units[op.unit], reach.home("home")
        rows, width = run.feed.row_slice.of(reach["batch"]), unit.row_numel
        row_grad = reach["row_grad"][: rows.numel() * width].view(-1, width)
        if "grad" in reach:
            reach["grad"].view(-1, width).index_copy_(0, rows, row_grad)
            _update(home, slice(0, unit.numel), reach["grad"], verdict, decay_numel=unit.decay_numel)
        else:
            for tile, (_, begin, end) in zip(self.layout.tiles(op.unit), run.feed.rows_by_tile, strict=True):
                grad = row_grad.new_zeros(tile.numel)
                grad.view(-1, width).index_copy_(0, rows[begin:end] - tile.start // width, row_grad[begin:end])
                decay_numel = tile.numel if unit.decay_numel else 0
                _update(home, slice(tile.start, tile.stop), grad, verdict, decay_numel=decay_numel)
        home.refresh()

    def _permitted(self, reach: Reach, run: Run) -> Verdict | None:
        verdict = reach.cell("verdict").value
        assert isinstance(verdict, Verdict)
        if not verdict.apply:
            return None
        run.writes_started = True
        return verdict


def _update(home: Home, part: slice, grad: torch.Tensor, verdict: Verdict, *, decay_numel: int) -> None:
    weight, residual, exp_avg, exp_avg_sq = (plane[part] for plane in home.planes)
    grad = grad[: part.stop - part.start]
    update_(weight, residual, grad, exp_avg, exp_avg_sq, verdict.decay, decay_numel=decay_numel)
