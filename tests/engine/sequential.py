"""The independent reference: one step at a time, everything resident, nothing overlapped, no plan and no lanes.

The model's own blocks, our head and the reference update. It rounds where the engine says it rounds: gradients summed
over micro-batches in fp32, then rounded once; norms in fp32 per parameter (per row for vocabulary matrices), combined
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slideformer.data.batches import MicroBatch
from slideformer.engine import EngineOptions
from slideformer.kernels.linear_cross_entropy import SlicedLoss, Softmax, loss_and_grads
from slideformer.layout import UnitKind
from slideformer.model.decoder import Decoder
from slideformer.optim import Hyper, join, reference_update, split


class Sequential:
    def __init__(self, decoder: Decoder, options: EngineOptions, device: str = "cpu") -> None:
        self.decoder, self.options, self.device = decoder, options, torch.device(device)
        self.layout, self.dtype = decoder.layout, decoder.dtype
        new = lambda n, dtype: torch.zeros(n, dtype=dtype, device=self.device)  # noqa: E731
        self.weight = [new(u.numel, torch.bfloat16) for u in self.layout.units]
        self.residual = [new(u.numel, torch.int16) for u in self.layout.units]
        self.exp_avg = [new(u.train_numel, torch.float32) for u in self.layout.units]
        self.exp_avg_sq = [new(u.train_numel, torch.float32) for u in self.layout.units]
        self.num_updates = 0

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        part = slice(offset, offset + values.numel())
        split(values.float().to(self.device), self.weight[unit][part], self.residual[unit][part])

    def flat(self, unit: int) -> torch.Tensor:
        if self.dtype is torch.float32:
            return join(self.weight[unit], self.residual[unit])
        return self.weight[unit].clone()

    def params(self, unit: int | None, *, grad: bool) -> dict[str, torch.Tensor]:
        if unit is None:
            return {}
        return self.decoder.views(unit, self.flat(unit), requires_grad=grad)

    def step(self, batch: Sequence[MicroBatch], lr: float) -> tuple[float, float]:
        """(loss, gradient norm before clipping)."""
        layout, decoder, device = self.layout, self.decoder, self.device
        glue_unit, final_unit = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
        table = self.flat(0).view(-1, decoder.hidden_size)
        ids = torch.cat([m.input_ids.flatten() for m in batch])
        rows = torch.unique(ids).to(device)
        remap = {int(r): i for i, r in enumerate(rows)}
        small = table[rows].clone()
        padding = remap.get(decoder.padding_idx) if decoder.padding_idx is not None else None
        local = [torch.tensor([[remap[int(i)] for i in row] for row in m.input_ids], device=device) for m in batch]
        num_targets = sum(int((m.labels[:, 1:] != -100).sum()) for m in batch)
        embed = lambda m, r, g: decoder.embed(  # noqa: E731
            r,
            g,
            local[m],
            padding_row=padding,
            attention_mask=None if batch[m].attention_mask is None else batch[m].attention_mask.to(device),
            position_ids=None if batch[m].position_ids is None else batch[m].position_ids.to(device),
        )
        sums: dict[tuple[int, str], torch.Tensor] = {}
        row_sum: torch.Tensor | None = None
        loss = torch.zeros((), device=device)
        tops, inputs, calls = [], [], []
        with torch.no_grad():
            for m in range(len(batch)):
                x, call = embed(m, small, self.params(glue_unit, grad=False))
                kept = []
                for unit in layout.blocks:
                    kept.append(x.clone())
                    x = decoder.forward(unit, self.params(unit, grad=False), x, call)
                inputs.append(kept)
                calls.append(call)
                tops.append(x)
        output = self.flat(layout.output).view(-1, decoder.hidden_size)
        output_sum = torch.zeros(output.shape, dtype=torch.float32, device=device)
        grads_down = []
        for m, micro in enumerate(batch):
            shifted = torch.full_like(micro.labels, -100)
            shifted[:, :-1] = micro.labels[:, 1:]
            where = (shifted.flatten() != -100).nonzero().flatten()
            labels = shifted.flatten()[where].to(device)
            where = where.to(device)
            final = self.params(final_unit, grad=True)
            x = tops[m].flatten(0, 1).index_select(0, where).requires_grad_()
            normed = decoder.final(final, x)
            bias = final[decoder.projection.bias] if decoder.projection.bias else None
            bias_sum = None if bias is None else torch.zeros_like(bias, dtype=torch.float32, requires_grad=False)
            if self.options.sliced_head is True:
                part, normed_grad = self._by_slices(
                    normed.detach(), labels, output, output_sum, bias, bias_sum, num_targets, m
                )
            else:
                with torch.no_grad():
                    part, normed_grad = loss_and_grads(
                        normed.detach(), output, None if bias is None else bias.detach(), labels,
                        Softmax(decoder.projection.scale, decoder.projection.softcap),
                        denominator=num_targets, weight_sum=output_sum, bias_sum=bias_sum, overwrite=m == 0,
                    )  # fmt: skip
            loss += part
            leaves = {n: p for n, p in final.items() if p is not bias and p.requires_grad}
            dx, *others = torch.autograd.grad(normed, [x, *leaves.values()], normed_grad)
            for name, g in zip(leaves, others, strict=True):
                self._add(sums, (final_unit, name), g)
            if bias_sum is not None and bias.requires_grad:
                self._add(sums, (final_unit, decoder.projection.bias), bias_sum)
            full = torch.zeros_like(tops[m].flatten(0, 1))
            full[where] = dx
            grads_down.append(full.view_as(tops[m]))
        for index, unit in reversed(list(enumerate(layout.blocks))):
            for m in range(len(batch)):
                params = self.params(unit, grad=True)
                x = inputs[m][index].detach().requires_grad_()
                out = decoder.forward(unit, params, x, calls[m])
                leaves = {n: p for n, p in params.items() if p.requires_grad}
                dx, *others = torch.autograd.grad(out, [x, *leaves.values()], grads_down[m])
                grads_down[m] = dx
                for name, g in zip(leaves, others, strict=True):
                    self._add(sums, (unit, name), g)
        tied, table_trained = layout.tied, layout.units[0].train_numel > 0
        if tied and table_trained:
            row_sum = output_sum[rows].clone()
        for m in range(len(batch)):
            r = small.detach().requires_grad_()
            glue = self.params(glue_unit, grad=True)
            leaves = {n: p for n, p in glue.items() if p.requires_grad}
            x, _ = embed(m, r, glue)
            if not (table_trained or leaves):
                break
            dr, *others = torch.autograd.grad(x, [r, *leaves.values()], grads_down[m])
            row_sum = dr.float() if row_sum is None else row_sum + dr
            for name, g in zip(leaves, others, strict=True):
                self._add(sums, (glue_unit, name), g)
        return self._finish(sums, output_sum, rows, row_sum, float(loss), lr)

    def _by_slices(self, normed, labels, output, output_sum, bias, bias_sum, num_targets, micro):
        """(loss, gradient of normed) with one tile of the projection at a time, there and back."""
        projection, width = self.decoder.projection, self.decoder.hidden_size
        loss = SlicedLoss(normed, labels, Softmax(projection.scale, projection.softcap), denominator=float(num_targets))
        parts = [slice(t.start // width, t.stop // width) for t in self.layout.tiles(self.layout.output)]
        cut = lambda vector, part: None if vector is None else vector.detach()[part]  # noqa: E731
        with torch.no_grad():
            for part in parts:
                loss.see(part.start, output[part], cut(bias, part))
            total = loss.loss()
            for part in reversed(parts):
                sums = {"weight_sum": output_sum[part], "bias_sum": cut(bias_sum, part)}
                loss.grads(part.start, output[part], cut(bias, part), **sums, overwrite=micro == 0)
            return total, loss.hidden_grad()

    def _add(self, sums, key, grad) -> None:
        sums[key] = sums[key] + grad if key in sums else grad.float()

    def _finish(self, sums, output_sum, rows, row_sum, loss, lr) -> tuple[float, float]:
        layout = self.layout
        grads: list[torch.Tensor | None] = []
        squares = []
        norm = lambda t: torch.linalg.vector_norm(t, dtype=torch.float32)  # noqa: E731
        by_row = lambda t: torch.linalg.vector_norm(t, dim=1, dtype=torch.float32)  # noqa: E731
        for index, unit in enumerate(layout.units):
            if not unit.train_numel:
                grads.append(None)
                continue
            if unit.kind in (UnitKind.TABLE, UnitKind.OUTPUT):
                dense = torch.zeros(unit.params[0].shape, dtype=self.dtype, device=self.device)
                if index == layout.output:
                    dense = output_sum.to(self.dtype)
                    rest = by_row(dense)
                    if index == 0:
                        rest[rows] = 0
                    squares.append(float(norm(rest)) ** 2)
                if index == 0:
                    dense[rows] = row_sum.to(self.dtype)
                    squares.append(float(norm(by_row(dense[rows]))) ** 2)
                grads.append(dense.flatten())
                continue
            parts = [sums[index, p.name].to(self.dtype) for p in unit.params if p.trainable]
            squares += [float(n) ** 2 for n in torch._foreach_norm(parts, 2, dtype=torch.float32)]
            grads.append(torch.cat([p.flatten() for p in parts]))
        total = math.sqrt(math.fsum(squares))
        limit = self.options.max_grad_norm
        scale = min(1.0, limit / (total + 1e-6)) if limit > 0 else 1.0
        self.num_updates += 1
        o = self.options
        for index, unit in enumerate(layout.units):
            if grads[index] is None:
                continue
            cut = unit.decay_numel
            for part, decay in ((slice(0, cut), o.weight_decay), (slice(cut, unit.train_numel), 0.0)):
                if part.stop > part.start:
                    hyper = Hyper(lr, o.beta1, o.beta2, o.eps, decay, self.num_updates, scale)
                    reference_update(
                        self.weight[index][part], self.residual[index][part], grads[index][part],
                        self.exp_avg[index][part], self.exp_avg_sq[index][part], hyper,
                    )  # fmt: skip
        return loss, total
