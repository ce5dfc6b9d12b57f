"""What the host lanes do besides updates: gather rows of the table, move tiles between disk and host, and decide about
a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from slideformer.engine.options import EngineOptions
from slideformer.engine.reach import Reach
from slideformer.engine.run import CANNOT_BE_TAKEN_BACK, NonFinite, Run
from slideformer.engine.updates import Updates
from slideformer.layout import Layout
from slideformer.native import HostKernels
from slideformer.schedule import Op, OpKind

log = logging.getLogger(__name__)


class HostActions:
    """Actions of the update and gather lanes; those that write the state are `updates`'s."""

    def __init__(self, layout: Layout, options: EngineOptions, kernels: HostKernels) -> None:
        self.layout, self.options, self.kernels = layout, options, kernels
        self.updates = Updates(layout, options, kernels)

    def table(self) -> dict[OpKind, Callable[[Reach, Run, Op], None]]:
        return {
            OpKind.GATHER: self.gather,
            OpKind.GUARD: self.guard,
            OpKind.DECIDE: self.decide,
            OpKind.TOTAL: self.total,
            OpKind.RESULT: self.result,
            **dict.fromkeys((OpKind.READ_STATE, OpKind.READ_ROWS, OpKind.READ_WEIGHTS, OpKind.READ_SAVED), self.read),
            **dict.fromkeys((OpKind.WRITE_STATE, OpKind.WRITE_ROWS, OpKind.WRITE_SAVED), self.write),
            **self.updates.table(),
        }

    def gather(self, reach: Reach, run: Run, op: Op) -> None:
        """Rows of one tile of the table, to where they lie among all the rows of the batch."""
        rows, begin, end = run.feed.rows_by_tile[op.tile]
        if begin == end:
            return
        width = self.layout.units[op.unit].row_numel
        out = reach["rows"][begin * width : end * width]
        numel = self.layout.tiles(op.unit)[op.tile].numel  # memory that it is staged in may be longer
        if "residual" not in reach:
            self.kernels.gather_rows(reach["weight"][:numel].view(-1, width), rows, out.view(-1, width))
            return
        planes = []
        for plane in (reach["weight"][:numel], reach["residual"][:numel]):
            planes.append(torch.empty((end - begin) * width, dtype=plane.dtype))
            self.kernels.gather_rows(plane.view(-1, width), rows, planes[-1].view(-1, width))
        self.kernels.join(*planes, out)

    def read(self, reach: Reach, run: Run, op: Op) -> None:
        for tile, memory in reach.staged():
            tile.read(memory)

    def write(self, reach: Reach, run: Run, op: Op) -> None:
        for tile, memory in reach.staged():
            tile.write(memory)

    # decisions

    def guard(self, reach: Reach, run: Run, op: Op) -> None:
        run.loss = float(reach["loss"])
        if not math.isfinite(run.loss):
            raise NonFinite(f"the loss is {run.loss}; no weight was changed in this step")
        self._go(reach, run, grad_scale=1.0)

    def decide(self, reach: Reach, run: Run, op: Op) -> None:
        """Clip as torch's clip_grad_norm_ does, or skip, or stop."""
        run.loss, run.grad_norm = float(reach["loss"]), _total_norm(reach)
        if not (math.isfinite(run.loss) and math.isfinite(run.grad_norm)):
            run.nonfinite = True
            if self.options.on_nonfinite == "stop":
                raise NonFinite(
                    f"the loss is {run.loss} and the gradient's norm {run.grad_norm}; no weight was changed in this "
                    "step"
                )
            log.warning("step skipped: the loss is %s and the gradient's norm %s", run.loss, run.grad_norm)
            verdict = self.updates.next_verdict(run, grad_scale=0.0)
            reach.cell("verdict").value = replace(verdict, apply=False)
            return
        limit = self.options.max_grad_norm
        scale = min(1.0, limit / (run.grad_norm + 1e-6)) if limit > 0 else 1.0
        self._go(reach, run, grad_scale=scale)

    def _go(self, reach: Reach, run: Run, *, grad_scale: float) -> None:
        reach.cell("verdict").value = self.updates.begin(run, grad_scale=grad_scale)

    def total(self, reach: Reach, run: Run, op: Op) -> None:
        run.grad_norm = _total_norm(reach)
        if not math.isfinite(run.grad_norm):  # a resident unit's: updates on the host have looked at their own
            raise NonFinite(CANNOT_BE_TAKEN_BACK)

    def result(self, reach: Reach, run: Run, op: Op) -> None:
        run.loss = float(reach["loss"])


def _total_norm(reach: Reach) -> float:
    """Norm of the norms, their squares summed exactly: Python's own `sum` rounds otherwise from 3.12 on."""
    return math.sqrt(math.fsum(n * n for norms in reach.tensors("norms") for n in norms.tolist()))
