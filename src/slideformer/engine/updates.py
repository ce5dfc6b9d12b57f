"""The update lane's work on the state: tiles, rows of the table, in place or ahead of the verdict.

Ahead: while backward still runs, new planes and moments are written to the tile's spare copy as if nothing were
clipped. When the global norm is known and does not clip, the spare copy becomes the state. If it does, the spare copy
first gets the new weights, which is all that the next forward reads, and the rest of the new state after all tiles'
weights; both from the old copy, with the right factor. Of the table only the rows that the batch touched are left to do
where nothing is clipped: first those that the next batch touches, if that is known by then; the others are not needed
before the output projection. Either way the result is that of the update in place. Clipped steps come in rows: after
one, nothing is tried ahead, since it would be done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from slideformer.engine.options import EngineOptions
from slideformer.engine.reach import Reach
from slideformer.engine.run import CANNOT_BE_TAKEN_BACK, NonFinite, Run, Verdict
from slideformer.layout import Layout
from slideformer.native import HostKernels, Parts, Planes
from slideformer.optim import Hyper
from slideformer.schedule import Op, OpKind


class Into(NamedTuple):
    """Where an update writes the new state, and how much of it. out: None is in place."""

    out: Planes | None = None
    parts: Parts = Parts.ALL


IN_PLACE = Into()


class Updates:
    """`num_updates` counts the steps that were applied (Adam's step); the update lane alone reads and writes it."""

    def __init__(self, layout: Layout, options: EngineOptions, kernels: HostKernels) -> None:
        self.layout, self.options, self.kernels = layout, options, kernels
        self.num_updates = 0
        self._clipped = False  # the step before

    def table(self) -> dict[OpKind, Callable[[Reach, Run, Op], None]]:
        return {
            OpKind.UPDATE: self.update,
            OpKind.UPDATE_TABLE: self.update_table,
            OpKind.UPDATE_REST: self.update_rest,
            OpKind.UPDATE_ROWS: self.update_rows,
            OpKind.UPDATE_AHEAD: self.update_ahead,
            OpKind.REST_AHEAD: self.rest_ahead,
            OpKind.SETTLE: self.settle,
            OpKind.SETTLE_ROWS: self.settle_rows,
            OpKind.SETTLE_OTHERS: self.settle_others,
            OpKind.COMPLETE: self.complete,
            OpKind.COMPLETE_ROWS: self.complete_rows,
        }

    def begin(self, run: Run, *, grad_scale: float) -> Verdict:
        """The numbers of an update that counts as applied from now on."""
        verdict = self.next_verdict(run, grad_scale=grad_scale)
        self.num_updates += 1
        self._clipped = grad_scale != 1.0
        return verdict

    def next_verdict(self, run: Run, *, grad_scale: float) -> Verdict:
        """The numbers of the next update."""
        o, step = self.options, self.num_updates + 1

        def hyper(weight_decay: float) -> Hyper:
            return Hyper(run.lr, o.beta1, o.beta2, o.eps, weight_decay, step, grad_scale)

        return Verdict(True, hyper(o.weight_decay), hyper(0.0))

    # in place

    def update(self, reach: Reach, run: Run, op: Op) -> None:
        verdict = self._permitted(reach, run)
        if verdict is not None:
            self._tile(op, self._planes(reach, op), reach["grad"], verdict)

    def update_table(self, reach: Reach, run: Run, op: Op) -> None:
        verdict = self._permitted(reach, run)
        if verdict is not None:
            self._all_rows(reach, run, op, self._planes(reach, op), verdict)

    def update_rest(self, reach: Reach, run: Run, op: Op) -> None:
        """Rows of one tile of the table that the batch did not touch. Untied, they have no gradient at all."""
        verdict = self._permitted(reach, run)
        if verdict is not None:
            self._rest(op, run, self._planes(reach, op), _optional(reach, "grad"), verdict)

    def update_rows(self, reach: Reach, run: Run, op: Op) -> None:
        """Rows of one tile of the table that the batch touched."""
        verdict = self._permitted(reach, run)
        if verdict is not None:
            self._rows(op, run, self._planes(reach, op), reach["grad"], verdict)

    # ahead

    def update_ahead(self, reach: Reach, run: Run, op: Op) -> None:
        if self._hopeful(reach, run, op):
            verdict = self.next_verdict(run, grad_scale=1.0)
            self._tile(op, self._planes(reach, op), reach["grad"], verdict, Into(reach.twin("spare").other))
            run.ahead.add((op.unit, op.tile))

    def rest_ahead(self, reach: Reach, run: Run, op: Op) -> None:
        if self._hopeful(reach, run, op):
            verdict = self.next_verdict(run, grad_scale=1.0)
            into = Into(reach.twin("spare").other)
            self._rest(op, run, self._planes(reach, op), _optional(reach, "grad"), verdict, into)
            run.ahead.add((op.unit, op.tile))

    def settle(self, reach: Reach, run: Run, op: Op) -> None:
        verdict, twin = self._permitted(reach, run), reach.twin("spare")
        if verdict is None:
            return
        if not self._holds(run, op, verdict):
            self._tile(op, self._planes(reach, op), reach["grad"], verdict, Into(twin.other, _new_parts(op)))
        twin.swap()

    def settle_rows(self, reach: Reach, run: Run, op: Op) -> None:
        """All rows; or, if others are there already from ahead of the verdict, those that this batch touched: the next
        one's, if they are known by now. Which others are left is for `settle_others`."""
        verdict, twin, left = self._permitted(reach, run), reach.twin("spare"), reach.cell("other_rows")
        if verdict is None:
            return
        planes, left.value = self._planes(reach, op), None
        if self._holds(run, op, verdict):
            among = self._read_next(run, op)
            left.value = None if among is None else ~among
            self._rows(op, run, planes, reach["row_grad"], verdict, Into(twin.other), among)
        else:
            self._all_rows(reach, run, op, planes, verdict, Into(twin.other, _new_parts(op)))
        twin.swap()

    def settle_others(self, reach: Reach, run: Run, op: Op) -> None:
        """Beside a gather that reads others of the tile."""
        verdict, twin, left = self._permitted(reach, run), reach.twin("spare"), reach.cell("other_rows").value
        if verdict is not None and isinstance(left, torch.Tensor):
            numel = self.layout.tiles(op.unit, trained=True)[op.tile].numel
            old = Planes(*(plane[:numel] for plane in twin.other))
            self._rows(op, run, old, reach["row_grad"], verdict, Into(self._planes(reach, op)), left)

    def _read_next(self, run: Run, op: Op) -> torch.Tensor | None:
        """Which rows of a tile of the table the next batch touches, as a mask; None if that is not known yet."""
        feed = run.next_feed
        if feed is None:
            return None
        among = torch.zeros(self.layout.tiles(op.unit)[op.tile].numel // self._width(op), dtype=torch.bool)
        among[feed.rows_by_tile[op.tile][0]] = True
        return among

    def complete(self, reach: Reach, run: Run, op: Op) -> None:
        """What `settle` has left out, from the copy that was the current one before it."""
        verdict = self._permitted(reach, run)
        if verdict is not None and not self._holds(run, op, verdict):
            old, into = self._half_new(reach, op)
            self._tile(op, old, reach["grad"], verdict, into)

    def complete_rows(self, reach: Reach, run: Run, op: Op) -> None:
        verdict = self._permitted(reach, run)
        if verdict is not None and not self._holds(run, op, verdict):
            old, into = self._half_new(reach, op)
            self._all_rows(reach, run, op, old, verdict, into)

    def _half_new(self, reach: Reach, op: Op) -> tuple[Planes, Into]:
        """Of a settled tile: the old state, and where the new one is with what that still lacks."""
        twin, parts = reach.twin("spare"), _new_parts(op)
        numel = self.layout.tiles(op.unit, trained=True)[op.tile].numel
        old, new = (Planes(*(plane[:numel] for plane in copy)) for copy in (twin.other, twin.current))
        return old, Into(new._replace(**{plane: reach[plane][:numel] for plane in parts.fields()}), parts)

    def _hopeful(self, reach: Reach, run: Run, op: Op) -> bool:
        """Whether the step may still end unclipped: the sum of squares only grows. After a clipped one: no."""
        if "norms" in reach and (op.tile == 0 or self._sliced(op)):
            run.squares += sum(n * n for n in reach["norms"].tolist())
        limit = self.options.max_grad_norm
        return not self._clipped and math.isfinite(run.squares) and (limit <= 0 or math.sqrt(run.squares) <= limit)

    def _sliced(self, op: Op) -> bool:
        """Its tiles come with norms of their own."""
        return self.options.sliced_head is True and op.unit == self.layout.output

    def _holds(self, run: Run, op: Op, verdict: Verdict) -> bool:
        """What was done ahead is what the verdict asks for."""
        return verdict.decay.grad_scale == 1.0 and (op.unit, op.tile) in run.ahead

    # pieces

    def _permitted(self, reach: Reach, run: Run) -> Verdict | None:
        """The verdict, if there is something to do. Eager: this unit's own norms are looked at first."""
        verdict = reach.cell("verdict").value
        assert isinstance(verdict, Verdict)
        if not verdict.apply:
            return None
        if "norms" in reach and not bool(torch.isfinite(reach["norms"]).all()):
            raise NonFinite(CANNOT_BE_TAKEN_BACK)
        run.writes_started = True
        return verdict

    def _planes(self, reach: Reach, op: Op) -> Planes:
        """The trained elements of the tile; memory that a plane is staged in may be longer."""
        numel = self.layout.tiles(op.unit, trained=True)[op.tile].numel
        return Planes(*(reach[plane][:numel] for plane in Planes._fields))

    def _tile(self, op: Op, planes: Planes, grad: torch.Tensor, verdict: Verdict, into: Into = IN_PLACE) -> None:
        unit = self.layout.units[op.unit]
        tile = self.layout.tiles(op.unit, trained=True)[op.tile]
        decaying = min(max(unit.decay_numel - tile.start, 0), tile.numel)
        for hyper, part in ((verdict.decay, slice(0, decaying)), (verdict.plain, slice(decaying, tile.numel))):
            if part.stop > part.start:
                weight, residual, exp_avg, exp_avg_sq = (plane[part] for plane in planes)
                out = None if into.out is None else Planes(*(plane[part] for plane in into.out))
                state = (weight, residual, grad[part], exp_avg, exp_avg_sq)
                self.kernels.update(*state, hyper, out=out, parts=into.parts)

    def _all_rows(
        self, reach: Reach, run: Run, op: Op, planes: Planes, verdict: Verdict, into: Into = IN_PLACE
    ) -> None:
        """In one pass: those that the batch touched have their gradients elsewhere."""
        width, grad = self._width(op), _optional(reach, "grad")
        rows = torch.arange(planes.weight.numel() // width)
        touched, begin, end = run.feed.rows_by_tile[op.tile]
        of_touched, more = reach["row_grad"][begin * width : end * width].view(-1, width), None
        if grad is None:  # untied: of the others it is zero
            grad, grad_rows, first = of_touched, torch.full_like(rows, -1), 0
        else:
            grad, grad_rows, first = grad[: planes.weight.numel()].view(-1, width), rows.clone(), len(rows)
            more = of_touched
        grad_rows[touched] = torch.arange(first, first + end - begin)
        self._some_rows(op, planes, rows, grad, grad_rows, verdict, into, more)

    def _rest(
        self,
        op: Op,
        run: Run,
        planes: Planes,
        grad: torch.Tensor | None,
        verdict: Verdict,
        into: Into = IN_PLACE,
    ) -> None:
        """Rows that the batch did not touch."""
        touched, _, _ = run.feed.rows_by_tile[op.tile]
        rest = torch.ones(planes.weight.numel() // self._width(op), dtype=torch.bool)
        rest[touched] = False
        rows = rest.nonzero().squeeze(1)
        if grad is not None:
            grad = grad[: planes.weight.numel()].view(-1, self._width(op))
        self._some_rows(op, planes, rows, grad, None if grad is None else rows, verdict, into)

    def _rows(
        self,
        op: Op,
        run: Run,
        planes: Planes,
        grad: torch.Tensor,
        verdict: Verdict,
        into: Into = IN_PLACE,
        among: torch.Tensor | None = None,
    ) -> None:
        """Rows that the batch touched, among those of the mask, or all. grad: of all touched rows of the table."""
        rows, begin, end = run.feed.rows_by_tile[op.tile]
        if end > begin:
            width, places = self._width(op), None
            if among is not None:
                places = among[rows].nonzero().squeeze(1)
                rows = rows[places]
            part = grad[begin * width : end * width].view(-1, width)
            self._some_rows(op, planes, rows, part, places, verdict, into)

    def _some_rows(
        self,
        op: Op,
        planes: Planes,
        rows: torch.Tensor,
        grad: torch.Tensor | None,
        grad_rows: torch.Tensor | None,
        verdict: Verdict,
        into: Into,
        more: torch.Tensor | None = None,
    ) -> None:
        width = self._width(op)
        hyper = verdict.decay if self.layout.units[op.unit].decay_numel else verdict.plain
        matrices = (plane.view(-1, width) for plane in planes)
        out = None if into.out is None else Planes(*(plane.view(-1, width) for plane in into.out))
        self.kernels.update_rows(*matrices, rows, grad, grad_rows, hyper, more=more, out=out, parts=into.parts)

    def _width(self, op: Op) -> int:
        return self.layout.units[op.unit].row_numel


def _new_parts(op: Op) -> Parts:
    """What is as it is to be after the step when the op is done, in the rows that it is for."""
    new = {a.role for a in op.accesses if (a.leaves or a.needs) == (a.role, op.unit, op.tile, 1)}
    return Parts(sum(part for part in Parts if new & set(part.fields())))


def _optional(reach: Reach, role: str) -> torch.Tensor | None:
    return reach[role] if role in reach else None
