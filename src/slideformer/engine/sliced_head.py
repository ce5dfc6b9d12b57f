"""The head, its projection tile by tile: what each op of it does. The sums over tiles are a value of each micro-batch.

The final norm runs twice, once for its value and once, when the gradient is there, for its graph; it is cheap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slideformer.engine.backward import gradients
from slideformer.engine.parameters import ModelActions
from slideformer.engine.reach import Reach
from slideformer.engine.run import Run
from slideformer.kernels.linear_cross_entropy import SlicedLoss
from slideformer.memory import Cell
from slideformer.schedule import Op, OpKind


class _State:
    """Of one micro-batch: the positions that have a target, before the final norm, and the loss of what follows it."""

    def __init__(self, hidden: torch.Tensor, loss: SlicedLoss, bias_sum: torch.Tensor | None) -> None:
        self.hidden, self.loss, self.bias_sum = hidden, loss, bias_sum


class SlicedHeadActions(ModelActions):
    """Actions of the compute lane."""

    def table(self) -> dict[OpKind, Callable[[Reach, Run, Op], None]]:
        return {
            OpKind.HEAD_OPEN: self.open,
            OpKind.HEAD_SEE: self.see,
            OpKind.HEAD_TOTAL: self.total,
            OpKind.HEAD_GRADS: self.grads,
            OpKind.HEAD_CLOSE: self.close,
            OpKind.REDUCE_SLICE: self.reduce,
            OpKind.NORM_OUTPUT: self.norm,
        }

    @torch.no_grad()
    def open(self, reach: Reach, run: Run, op: Op) -> None:
        micro, batch, width = run.feed.micro[op.micro], reach["batch"], self.decoder.hidden_size
        rows, length = micro.shape
        hidden = reach["input"][: rows * length * width].view(-1, width).index_select(0, micro.targets.of(batch))
        params = self._final_params(reach, requires_grad=False)
        normed = self.decoder.final(params, hidden)
        labels, denominator = micro.labels.of(batch), float(run.feed.num_target_tokens)
        loss = SlicedLoss(normed, labels, self._softmax, denominator=denominator)
        bias = self._bias(params)
        bias_sum = None if bias is None else torch.zeros_like(bias, dtype=torch.float32, requires_grad=False)
        reach.cell("state").value = _State(hidden, loss, bias_sum)

    @torch.no_grad()
    def see(self, reach: Reach, run: Run, op: Op) -> None:
        first_row, weight, bias = self._slice(reach, op)
        for state in _states(reach.cells("state")):
            state.loss.see(first_row, weight, bias)

    @torch.no_grad()
    def total(self, reach: Reach, run: Run, op: Op) -> None:
        losses = [state.loss.loss() for state in _states(reach.cells("state"))]
        reach["loss"].copy_(losses[0])
        for loss in losses[1:]:
            reach["loss"].add_(loss)
        if not run.trains:  # nobody closes them
            for cell in reach.cells("state"):
                cell.value = None

    @torch.no_grad()
    def grads(self, reach: Reach, run: Run, op: Op) -> None:
        first_row, weight, bias = self._slice(reach, op)
        total = reach["grad"][: weight.numel()].view_as(weight) if "grad" in reach else None
        for index, state in enumerate(_states(reach.cells("state"))):
            part = None if state.bias_sum is None else state.bias_sum[first_row : first_row + weight.shape[0]]
            state.loss.grads(first_row, weight, bias, weight_sum=total, bias_sum=part, overwrite=index == 0)

    @torch.no_grad()
    def close(self, reach: Reach, run: Run, op: Op) -> None:
        targets = run.feed.micro[op.micro].targets.of(reach["batch"])
        params = self._final_params(reach, requires_grad="final_grad" in reach)
        cell = reach.cell("state")
        (state,), cell.value = _states([cell]), None
        bias = self._bias(params)
        norm_params = {n: p for n, p in params.items() if p.requires_grad and p is not bias}
        hidden = state.hidden.requires_grad_()
        with torch.enable_grad():
            normed = self.decoder.final(params, hidden)
        found = gradients(normed, [hidden, *norm_params.values()], state.loss.hidden_grad())
        if "hidden_grad" in reach:
            rows, length = run.feed.micro[op.micro].shape
            width = self.decoder.hidden_size
            full = reach["hidden_grad"][: rows * length * width].view(-1, width)
            full.zero_().index_copy_(0, targets, found[0])
        if "final_grad" in reach:
            by_name = dict(zip(norm_params, found[1:], strict=True))
            if bias is not None and bias.requires_grad:
                assert state.bias_sum is not None
                by_name[str(self.decoder.projection.bias)] = state.bias_sum
            assert self._final is not None
            self._accumulate(self._final, reach["final_grad"], by_name, first=op.micro == 0)

    @torch.no_grad()
    def reduce(self, reach: Reach, run: Run, op: Op) -> None:
        tile, width = self.layout.tiles(op.unit)[op.tile], self.decoder.hidden_size
        total, grad = (reach[role][: tile.numel].view(-1, width) for role in ("sum", "grad"))
        first_row = tile.start // width
        norms = reach["row_norms"][first_row : first_row + grad.shape[0]]
        grad.copy_(total)
        torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32, out=norms)
        if "row_grad" in reach:
            touched, begin, end = run.feed.rows_by_tile[op.tile]
            rows = run.feed.row_slice.of(reach["batch"])[begin:end] - first_row
            target = reach["row_grad"][begin * width : end * width].view(-1, width)
            if touched.numel():
                torch.index_select(total, 0, rows, out=target)
                norms.index_fill_(0, rows, 0.0)
        torch.linalg.vector_norm(norms, out=reach["norm"].view(()))

    @torch.no_grad()
    def norm(self, reach: Reach, run: Run, op: Op) -> None:
        torch.linalg.vector_norm(reach["row_norms"], out=reach["norm"].view(()))

    # pieces

    def _slice(self, reach: Reach, op: Op) -> tuple[int, torch.Tensor, torch.Tensor | None]:
        """First row, [Vs, H] weights and [Vs] bias of the tile."""
        tile, width = self.layout.tiles(op.unit)[op.tile], self.decoder.hidden_size
        first_row, num_rows = tile.start // width, tile.numel // width
        bias = self._bias(self._final_params(reach, requires_grad=False))
        part = None if bias is None else bias[first_row : first_row + num_rows]
        return first_row, reach["weights"][: tile.numel].view(-1, width), part


def _states(cells: list[Cell]) -> list[_State]:
    return [cell.value for cell in cells if isinstance(cell.value, _State)]
