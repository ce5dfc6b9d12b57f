"""What each kind of op does: one short function a kind. None of them waits, and none names a lane.

An action reaches buffers only through its `Reach`: what its op declares, by role. Sizes of the batch in hand come from
the run's feed; parameters are views into slots, by offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from slideformer.engine.backward import gradients
from slideformer.engine.parameters import ModelActions
from slideformer.engine.reach import Reach
from slideformer.engine.run import Run
from slideformer.kernels.linear_cross_entropy import loss_and_grads, loss_only
from slideformer.layout import UnitKind
from slideformer.memory import Cell
from slideformer.model.decoder import Call, Decoder
from slideformer.native import HostKernels
from slideformer.optim import join
from slideformer.schedule import Op, OpKind
from slideformer.schedule.ops import DISK_LANES

Action = Callable[[Reach, Run, Op], None]


class Kept(NamedTuple):
    """Input and output of a block that ran under grad: the ends of its graph."""

    x: torch.Tensor
    out: torch.Tensor


def _taken(cell: Cell) -> Kept:
    kept, cell.value = cell.value, None
    assert isinstance(kept, Kept)
    return kept


class DeviceActions(ModelActions):
    """Actions of the device lanes. One instance per engine; calls come from several threads, but the model itself is
    only touched by the compute lane."""

    def __init__(self, decoder: Decoder, kernels: HostKernels) -> None:
        super().__init__(decoder)
        self._kernels, self._glue = kernels, self.layout.find(UnitKind.GLUE)

    def table(self) -> dict[OpKind, Action]:
        return {
            OpKind.LOAD: self.load,
            OpKind.PICK_ROWS: self.pick_rows,
            OpKind.UPLOAD_ROWS: self.upload_rows,
            OpKind.UPLOAD: self.upload,
            OpKind.EMBED: self.embed,
            OpKind.FORWARD: self.forward,
            OpKind.FORWARD_KEEP: self.forward_keep,
            OpKind.SPILL: self.spill,
            OpKind.FETCH: self.fetch,
            OpKind.HEAD: self.head,
            OpKind.HEAD_LOSS: self.head_loss,
            OpKind.BACKWARD: self.backward,
            OpKind.BACKWARD_KEPT: self.backward_kept,
            OpKind.EMBED_BACKWARD: self.embed_backward,
            OpKind.REDUCE: self.reduce,
            OpKind.REDUCE_OUTPUT: self.reduce_output,
            OpKind.REDUCE_ROWS: self.reduce_rows,
            OpKind.REPORT: self.copy,
            OpKind.REPORT_LOSS: self.copy,
            OpKind.DOWNLOAD: self.download,
            OpKind.DOWNLOAD_ROWS: self.download_rows,
        }

    # transfers

    def copy(self, reach: Reach, run: Run, op: Op) -> None:
        reach["target"].copy_(reach["source"], non_blocking=True)

    def spill(self, reach: Reach, run: Run, op: Op) -> None:
        """To the host, or straight to a file."""
        if op.lane in DISK_LANES:
            reach.stored("target").write(reach["source"])
        else:
            self.copy(reach, run, op)

    def fetch(self, reach: Reach, run: Run, op: Op) -> None:
        """And back."""
        if op.lane in DISK_LANES:
            reach.stored("source").read(reach["target"])
        else:
            self.copy(reach, run, op)

    def load(self, reach: Reach, run: Run, op: Op) -> None:
        flat = run.feed.flat
        reach["batch"][: flat.numel()].copy_(flat, non_blocking=True)

    def upload_rows(self, reach: Reach, run: Run, op: Op) -> None:
        numel = run.feed.rows.numel() * self.decoder.hidden_size
        reach["target"][:numel].copy_(reach["source"][:numel], non_blocking=True)

    def upload(self, reach: Reach, run: Run, op: Op) -> None:
        tile = self.layout.tiles(op.unit)[op.tile]
        target = reach["slice"][: tile.numel] if "slice" in reach else reach["target"][tile.start : tile.stop]
        if op.lane in DISK_LANES:  # straight from a file
            reach.stored("weight").read(target)
            return
        weight = reach["weight"][: tile.numel]  # memory that it is staged in may be longer
        if "residual" not in reach:
            target.copy_(weight, non_blocking=True)
        elif target.is_cpu:
            self._kernels.join(weight, reach["residual"][: tile.numel], target)
        else:
            halves = (weight, reach["residual"][: tile.numel])
            planes = (plane.to(target.device, non_blocking=True) for plane in halves)
            target.copy_(join(*planes))

    def download(self, reach: Reach, run: Run, op: Op) -> None:
        tile = self.layout.tiles(op.unit, trained=True)[op.tile]
        source = reach["slice"][: tile.numel] if "slice" in reach else reach["source"][tile.start : tile.stop]
        reach["target"][: tile.numel].copy_(source, non_blocking=True)

    def download_rows(self, reach: Reach, run: Run, op: Op) -> None:
        self.upload_rows(reach, run, op)

    # the walk up

    def pick_rows(self, reach: Reach, run: Run, op: Op) -> None:
        rows, width = run.feed.row_slice.of(reach["batch"]), self.decoder.hidden_size
        out = reach["target"][: rows.numel() * width].view(-1, width)
        torch.index_select(reach["table"].view(-1, width), 0, rows, out=out)

    @torch.no_grad()
    def embed(self, reach: Reach, run: Run, op: Op) -> None:
        hidden, call = self._embed(reach, run, op, requires_grad=False)[:2]
        reach["hidden"][: hidden.numel()].view(hidden.shape).copy_(hidden)
        reach.cell("call").value = call

    @torch.no_grad()
    def forward(self, reach: Reach, run: Run, op: Op) -> None:
        params = self._params(op.unit, reach["weights"], requires_grad=False)
        x = self._hidden(reach["input"], run, op)
        out = self.decoder.forward(op.unit, params, x, reach.cell("call").value)
        self._hidden(reach["hidden"], run, op).copy_(out)

    @torch.no_grad()
    def forward_keep(self, reach: Reach, run: Run, op: Op) -> None:
        """As forward, and the graph stays for backward, with its input copied: the place of that is soon another's."""
        params = self._params(op.unit, reach["weights"], requires_grad=True)
        x = self._hidden(reach["input"], run, op).clone().requires_grad_()
        with torch.enable_grad():
            out = self.decoder.forward(op.unit, params, x, reach.cell("call").value)
        self._hidden(reach["hidden"], run, op).copy_(out)
        reach.cell("graph").value = Kept(x, out)

    # the turn

    @torch.no_grad()
    def head_loss(self, reach: Reach, run: Run, op: Op) -> None:
        targets, labels = self._targets(reach, run, op)
        final = self._final_params(reach, requires_grad=False)
        hidden = self._hidden(reach["input"], run, op).flatten(0, 1).index_select(0, targets)
        normed = self.decoder.final(final, hidden)
        loss = loss_only(normed, self._output(reach), self._bias(final), labels, self._softmax)
        self._add_loss(reach, op, loss / run.feed.num_target_tokens)

    @torch.no_grad()
    def head(self, reach: Reach, run: Run, op: Op) -> None:
        """Only positions with a target pass through the head; the others have no gradient."""
        targets, labels = self._targets(reach, run, op)
        final = self._final_params(reach, requires_grad="final_grad" in reach)
        hidden = self._hidden(reach["input"], run, op).flatten(0, 1).index_select(0, targets).requires_grad_()
        with torch.enable_grad():
            normed = self.decoder.final(final, hidden)
        weight, bias = self._output(reach), self._bias(final)
        bias_sum = None
        if bias is not None and bias.requires_grad:
            bias_sum = torch.empty_like(bias, dtype=torch.float32, requires_grad=False)
        loss, normed_grad = loss_and_grads(
            normed.detach(),
            weight,
            None if bias is None else bias.detach(),
            labels,
            self._softmax,
            denominator=run.feed.num_target_tokens,
            weight_sum=reach["output_grad"].view_as(weight) if "output_grad" in reach else None,
            bias_sum=bias_sum,
            overwrite=op.micro == 0,
        )
        self._add_loss(reach, op, loss)
        norm_params = {n: p for n, p in final.items() if p.requires_grad and p is not bias}
        grads = gradients(normed, [hidden, *norm_params.values()], normed_grad)
        if "hidden_grad" in reach:
            full = self._hidden(reach["hidden_grad"], run, op).flatten(0, 1)
            full.zero_().index_copy_(0, targets, grads[0])
        if "final_grad" in reach:
            assert self._final is not None
            by_name = dict(zip(norm_params, grads[1:], strict=True))
            if bias_sum is not None:
                by_name[str(self.decoder.projection.bias)] = bias_sum
            self._accumulate(self._final, reach["final_grad"], by_name, first=op.micro == 0)

    # the walk down

    @torch.no_grad()
    def backward(self, reach: Reach, run: Run, op: Op) -> None:
        params = self._params(op.unit, reach["weights"], requires_grad="grad" in reach)

        def rerun() -> Kept:
            x = self._hidden(reach["input"], run, op).detach().requires_grad_(reach.writes("hidden_grad"))
            with torch.enable_grad():
                return Kept(x, self.decoder.rerun(op.unit, params, x, reach.cell("call").value))

        self._backward(reach, run, op, params, rerun)

    @torch.no_grad()
    def backward_kept(self, reach: Reach, run: Run, op: Op) -> None:
        params = self._params(op.unit, reach["weights"], requires_grad=True)
        self._backward(reach, run, op, params, lambda: _taken(reach.cell("graph")))

    def _backward(
        self, reach: Reach, run: Run, op: Op, params: dict[str, torch.Tensor], graph: Callable[[], Kept]
    ) -> None:
        trains, wants_input = "grad" in reach, reach.writes("hidden_grad")
        d = self._hidden(reach["hidden_grad"], run, op)
        kept = graph()
        trained = {n: p for n, p in params.items() if p.requires_grad} if trains else {}
        grads = gradients(kept.out, [*trained.values(), *([kept.x] if wants_input else [])], d)
        if wants_input:
            d.copy_(grads.pop())
        if trains:
            by_name = dict(zip(trained, grads, strict=True))
            self._accumulate(op.unit, reach["grad"], by_name, first=op.micro == 0)

    @torch.no_grad()
    def embed_backward(self, reach: Reach, run: Run, op: Op) -> None:
        with torch.enable_grad():
            hidden, _, rows, glue = self._embed(reach, run, op, requires_grad=True)
        wants_rows = "row_grad" in reach
        trained = {n: p for n, p in glue.items() if p.requires_grad} if "glue_grad" in reach else {}
        leaves = [*([rows] if wants_rows else []), *trained.values()]
        grads = gradients(hidden, leaves, self._hidden(reach["hidden_grad"], run, op))
        if wants_rows:
            row_grad = grads.pop(0)
            target = reach["row_grad"][: row_grad.numel()].view(row_grad.shape)
            if op.micro or self.layout.tied:
                target.add_(row_grad)
            else:
                target.copy_(row_grad)
        if trained:
            assert self._glue is not None
            by_name = dict(zip(trained, grads, strict=True))
            self._accumulate(self._glue, reach["glue_grad"], by_name, first=op.micro == 0)

    @torch.no_grad()
    def reduce(self, reach: Reach, run: Run, op: Op) -> None:
        grad = reach["grad"]
        numel = self.layout.units[op.unit].train_numel
        if "sum" in reach:
            grad[:numel].copy_(reach["sum"][:numel])
        norms = torch._foreach_norm(list(self._grad_views(op.unit, grad).values()), 2, dtype=torch.float32)
        torch.stack(norms, out=reach["norm"])

    @torch.no_grad()
    def reduce_output(self, reach: Reach, run: Run, op: Op) -> None:
        """Norms row by row, so that the rows whose gradient is not complete yet (tied) can be left out."""
        grad, width = reach["grad"], self.decoder.hidden_size
        total = reach["sum"] if "sum" in reach else grad
        if "row_grad" in reach:
            rows = run.feed.row_slice.of(reach["batch"])
            target = reach["row_grad"][: rows.numel() * width].view(-1, width)
            torch.index_select(total.view(-1, width), 0, rows, out=target)
        if total is not grad:
            grad.copy_(total)
        norms = torch.linalg.vector_norm(grad.view(-1, width), dim=1, dtype=torch.float32)
        if "row_grad" in reach:
            norms.index_fill_(0, rows, 0.0)
        torch.linalg.vector_norm(norms, out=reach["norm"].view(()))

    @torch.no_grad()
    def reduce_rows(self, reach: Reach, run: Run, op: Op) -> None:
        width = self.decoder.hidden_size
        numel = run.feed.rows.numel() * width
        grad = reach["grad"][:numel]
        if "sum" in reach:
            grad.copy_(reach["sum"][:numel])
        norms = torch.linalg.vector_norm(grad.view(-1, width), dim=1, dtype=torch.float32)
        torch.linalg.vector_norm(norms, out=reach["norm"].view(()))

    # pieces

    def _embed(
        self, reach: Reach, run: Run, op: Op, *, requires_grad: bool
    ) -> tuple[torch.Tensor, Call, torch.Tensor, dict[str, torch.Tensor]]:
        micro, batch = run.feed.micro[op.micro], reach["batch"]
        width = self.decoder.hidden_size
        rows = reach["rows"][: run.feed.rows.numel() * width].view(-1, width).detach().requires_grad_(requires_grad)
        glue: dict[str, torch.Tensor] = {}
        if "glue" in reach:
            assert self._glue is not None
            glue = self._params(self._glue, reach["glue"], requires_grad=requires_grad)
        hidden, call = self.decoder.embed(
            rows,
            glue,
            micro.ids.of(batch),
            padding_row=run.feed.padding_row,
            attention_mask=None if micro.attention_mask is None else micro.attention_mask.of(batch),
            position_ids=None if micro.position_ids is None else micro.position_ids.of(batch),
            packing=micro.packing,
        )
        return hidden, call, rows, glue

    def _hidden(self, flat: torch.Tensor, run: Run, op: Op) -> torch.Tensor:
        rows, length = run.feed.micro[op.micro].shape
        width = self.decoder.hidden_size
        return flat[: rows * length * width].view(rows, length, width)

    def _targets(self, reach: Reach, run: Run, op: Op) -> tuple[torch.Tensor, torch.Tensor]:
        micro, batch = run.feed.micro[op.micro], reach["batch"]
        return micro.targets.of(batch), micro.labels.of(batch)

    def _output(self, reach: Reach) -> torch.Tensor:
        return reach["output"].view(-1, self.decoder.hidden_size)

    def _add_loss(self, reach: Reach, op: Op, loss: torch.Tensor) -> None:
        target = reach["loss"]
        target.add_(loss) if op.micro else target.copy_(loss)
