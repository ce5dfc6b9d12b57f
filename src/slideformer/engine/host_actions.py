"""What the host lanes do: gather rows of the table, decide about a step, update the state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from slideformer.engine.options import EngineOptions
from slideformer.engine.reach import Reach
from slideformer.engine.run import NonFinite, Run, Verdict
from slideformer.layout import Layout
from slideformer.memory import Moments
from slideformer.native import HostKernels
from slideformer.optim import Hyper
from slideformer.schedule import Op, OpKind

log = logging.getLogger(__name__)


class HostActions:
    """Actions of the update and gather lanes. `num_updates` counts the steps that were applied (Adam's step)."""

    def __init__(self, layout: Layout, options: EngineOptions, kernels: HostKernels) -> None:
        self.layout, self.options, self.kernels = layout, options, kernels
        self.num_updates = 0

    def table(self) -> dict[OpKind, Callable[[Reach, Run, Op], None]]:
        return {
            OpKind.GATHER: self.gather,
            OpKind.GUARD: self.guard,
            OpKind.DECIDE: self.decide,
            OpKind.TOTAL: self.total,
            OpKind.RESULT: self.result,
            OpKind.UPDATE: self.update,
            OpKind.UPDATE_REST: self.update_rest,
            OpKind.UPDATE_ROWS: self.update_rows,
        }

    def gather(self, reach: Reach, run: Run, op: Op) -> None:
        """Rows of one tile of the table, to where they lie among all the rows of the batch."""
        rows, begin, end = run.feed.rows_by_tile[op.tile]
        if begin == end:
            return
        width = self.layout.units[op.unit].row_numel
        out = reach["rows"][begin * width : end * width]
        if "residual" not in reach:
            self.kernels.gather_rows(reach["weight"].view(-1, width), rows, out.view(-1, width))
            return
        planes = []
        for plane in (reach["weight"], reach["residual"]):
            planes.append(torch.empty((end - begin) * width, dtype=plane.dtype))
            self.kernels.gather_rows(plane.view(-1, width), rows, planes[-1].view(-1, width))
        self.kernels.join(*planes, out)

    # decisions

    def guard(self, reach: Reach, run: Run, op: Op) -> None:
        run.loss = float(reach["loss"])
        if not math.isfinite(run.loss):
            raise NonFinite(f"the loss is {run.loss}; no weight was changed in this step")
        reach.cell("verdict").value = self._verdict(run, grad_scale=1.0)

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
            hyper = self._hyper(run, 0.0, 0.0, step=self.num_updates + 1)
            reach.cell("verdict").value = Verdict(False, hyper, hyper)
            return
        limit = self.options.max_grad_norm
        scale = min(1.0, limit / (run.grad_norm + 1e-6)) if limit > 0 else 1.0
        reach.cell("verdict").value = self._verdict(run, grad_scale=scale)

    def total(self, reach: Reach, run: Run, op: Op) -> None:
        run.grad_norm = _total_norm(reach)

    def result(self, reach: Reach, run: Run, op: Op) -> None:
        run.loss = float(reach["loss"])

    def _verdict(self, run: Run, *, grad_scale: float) -> Verdict:
        self.num_updates += 1
        decay, step = self.options.weight_decay, self.num_updates
        return Verdict(
            True, self._hyper(run, decay, grad_scale, step=step), self._hyper(run, 0.0, grad_scale, step=step)
        )

    def _hyper(self, run: Run, weight_decay: float, grad_scale: float, *, step: int) -> Hyper:
        o = self.options
        return Hyper(
            lr=run.lr,
            beta1=o.beta1,
            beta2=o.beta2,
            eps=o.eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
        )

    # updates

    def update(self, reach: Reach, run: Run, op: Op) -> None:
        verdict = self._permitted(reach, run)
        if verdict is None:
            return
        unit = self.layout.units[op.unit]
        tile = self.layout.tiles(op.unit, trained=True)[op.tile]
        decaying = min(max(unit.decay_numel - tile.start, 0), tile.numel)
        exp_avg, exp_avg_sq = reach.moments()[0]
        for hyper, part in ((verdict.decay, slice(0, decaying)), (verdict.plain, slice(decaying, tile.numel))):
            if part.stop > part.start:
                self.kernels.update(
                    reach["weight"][part],
                    reach["residual"][part],
                    reach["grad"][part],
                    exp_avg[part],
                    exp_avg_sq[part],
                    hyper,
                )

    def update_rest(self, reach: Reach, run: Run, op: Op) -> None:
        """Rows of one tile of the table that the batch did not touch. Untied, they have no gradient at all."""
        verdict = self._permitted(reach, run)
        if verdict is None:
            return
        width = self.layout.units[op.unit].row_numel
        touched, _, _ = run.feed.rows_by_tile[op.tile]
        rest = torch.ones(reach["weight"].numel() // width, dtype=torch.bool)
        rest[touched] = False
        rows = rest.nonzero().squeeze(1)
        grad = reach["grad"][: reach["weight"].numel()].view(-1, width) if "grad" in reach else None
        planes = self._matrices(reach["weight"], reach["residual"], reach.moments()[0], width)
        self.kernels.update_rows(*planes, rows, grad, None if grad is None else rows, self._row_hyper(op, verdict))

    def update_rows(self, reach: Reach, run: Run, op: Op) -> None:
        """Rows of one tile of the table that the batch touched."""
        verdict = self._permitted(reach, run)
        rows, begin, end = run.feed.rows_by_tile[op.tile]
        if verdict is None or begin == end:
            return
        width = self.layout.units[op.unit].row_numel
        grad = reach["grad"][begin * width : end * width].view(-1, width)
        planes = self._matrices(reach["weight"], reach["residual"], reach.moments()[0], width)
        self.kernels.update_rows(*planes, rows, grad, None, self._row_hyper(op, verdict))

    def _permitted(self, reach: Reach, run: Run) -> Verdict | None:
        """The verdict, if there is something to do. Eager: this unit's own norms are looked at first."""
        verdict = reach.cell("verdict").value
        assert isinstance(verdict, Verdict)
        if not verdict.apply:
            return None
        if "norms" in reach and not bool(torch.isfinite(reach["norms"]).all()):
            raise NonFinite(
                "a gradient is not finite, and an eager update cannot be taken back: what was already updated in this "
                "step stays; use update: deferred to stop before any write"
            )
        run.writes_started = True
        return verdict

    def _row_hyper(self, op: Op, verdict: Verdict) -> Hyper:
        return verdict.decay if self.layout.units[op.unit].decay_numel else verdict.plain

    def _matrices(
        self, weight: torch.Tensor, residual: torch.Tensor, moments: Moments, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        exp_avg, exp_avg_sq = moments
        return weight.view(-1, width), residual.view(-1, width), exp_avg.view(-1, width), exp_avg_sq.view(-1, width)


def _total_norm(reach: Reach) -> float:
    """Norm of the norms, summed in double in parameter order."""
    return math.sqrt(sum(n * n for norms in reach.tensors("norms") for n in norms.tolist()))
