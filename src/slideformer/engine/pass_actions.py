"""What the ops of a pass of generation do, beside those that it shares with training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from slideformer.device import Device
from slideformer.engine.actions import DeviceActions
from slideformer.engine.feed import Feed
from slideformer.engine.host_actions import HostActions
from slideformer.engine.options import EngineOptions
from slideformer.engine.reach import Reach
from slideformer.engine.sequences import PassRun, Sequences
from slideformer.layout import Layout
from slideformer.model.decoder import Decoder
from slideformer.native import HostKernels
from slideformer.schedule import Op, OpKind


@dataclass(slots=True)
class Ends:
    """The last positions of a micro-batch's rows, through the final norm, and their logits as far as they are known."""

    normed: torch.Tensor
    logits: list[torch.Tensor] = field(default_factory=list)


class PassActions(DeviceActions):
    """Of the device lanes, and of the host lanes what makes a pass's batch and takes its tokens."""

    def __init__(self, decoder: Decoder, kernels: HostKernels, device: Device, layout: Layout) -> None:
        super().__init__(decoder, kernels)
        self._device, self._kept_numel = device, decoder.cache_shape.numel
        self._host = HostActions(layout, EngineOptions(), kernels)

    def table(self) -> dict[OpKind, Callable[[Reach, PassRun, Op], None]]:
        return {
            **super().table(),
            **self._host.table(),
            OpKind.NEXT: self.next,
            OpKind.EMBED_CACHED: self.embed_cached,
            OpKind.FORWARD_CACHED: self.forward_cached,
            OpKind.FETCH_CACHE: self.fetch_cache,
            OpKind.SPILL_CACHE: self.spill_cache,
            OpKind.HEAD_LAST: self.head_last,
            OpKind.HEAD_LOGITS: self.head_logits,
            OpKind.HEAD_PICK: self.head_pick,
            OpKind.REPORT_TOKENS: self.report_tokens,
            OpKind.TAKE: self.take,
        }

    def next(self, reach: Reach, run: PassRun, op: Op) -> None:
        laid_out = reach.cell("feed")
        feed = _sequences(reach).feed(self.layout)
        laid_out.value = run.feed = replace(feed, flat=self._device.stage(feed.flat))

    def load(self, reach: Reach, run: PassRun, op: Op) -> None:
        feed = reach.cell("feed").value
        assert isinstance(feed, Feed)
        reach["batch"][: feed.flat.numel()].copy_(feed.flat, non_blocking=True)

    @torch.no_grad()
    def embed_cached(self, reach: Reach, run: PassRun, op: Op) -> None:
        micro, batch, width = run.feed.micro[op.micro], reach["batch"], self.decoder.hidden_size
        glue = {}
        if "glue" in reach:
            assert self._glue is not None
            glue = self._params(self._glue, reach["glue"], requires_grad=False)
        assert micro.position_ids is not None
        hidden, call = self.decoder.embed(
            reach["rows"][: run.feed.rows.numel() * width].view(-1, width),
            glue,
            micro.ids.of(batch),
            padding_row=None,
            attention_mask=None if micro.attention_mask is None else micro.attention_mask.of(batch),
            position_ids=micro.position_ids.of(batch),
            cache=self.decoder.pass_cache(run.cached[op.micro]),
        )
        self._hidden(reach["hidden"], run, op).copy_(hidden)
        reach.cell("call").value = call

    @torch.no_grad()
    def forward_cached(self, reach: Reach, run: PassRun, op: Op) -> None:
        params = self._params(op.unit, reach["weights"], requires_grad=False)
        x = self._hidden(reach["input"], run, op)
        out = self.decoder.forward_cached(op.unit, params, x, reach.cell("call").value, reach["cache"])
        self._hidden(reach["hidden"], run, op).copy_(out)

    def fetch_cache(self, reach: Reach, run: PassRun, op: Op) -> None:
        """All that there is so far."""
        numel = run.cached[op.micro] * self._row_numel(run, op)
        reach["target"][:numel].copy_(reach["source"][:numel], non_blocking=True)

    def spill_cache(self, reach: Reach, run: PassRun, op: Op) -> None:
        """The new positions."""
        row_numel, first = self._row_numel(run, op), run.cached[op.micro]
        new = run.feed.micro[op.micro].shape[1]
        part = slice(first * row_numel, (first + new) * row_numel)
        reach["target"][part].copy_(reach["source"][part], non_blocking=True)

    @torch.no_grad()
    def head_last(self, reach: Reach, run: PassRun, op: Op) -> None:
        last = self._hidden(reach["input"], run, op)[:, -1].clone()
        final = self._final_params(reach, requires_grad=False)
        reach.cell("state").value = Ends(self.decoder.final(final, last))

    @torch.no_grad()
    def head_logits(self, reach: Reach, run: PassRun, op: Op) -> None:
        """Of the last positions alone, so they are whole in fp32: 0.5 MB a prompt for a vocabulary of 128 k."""
        weight, bias = reach["weights"], self._bias(self._final_params(reach, requires_grad=False))
        if op.tile >= 0:
            tile, width = self.layout.tiles(op.unit)[op.tile], self.decoder.hidden_size
            weight = weight[: tile.numel]
            bias = None if bias is None else bias[tile.start // width : tile.stop // width]
        for cell in reach.cells("state"):
            ends = cell.value
            assert isinstance(ends, Ends)
            matrix = weight.view(-1, self.decoder.hidden_size)
            ends.logits.append(self.decoder.projection.logits(ends.normed, matrix, bias).float())

    @torch.no_grad()
    def head_pick(self, reach: Reach, run: PassRun, op: Op) -> None:
        tokens, numbers = reach["tokens"], run.numbers[op.micro]
        ends, reach.cell("state").value = reach.cell("state").value, None
        assert isinstance(ends, Ends) and run.chooser is not None
        tokens[: len(numbers)].copy_(run.chooser.choose(torch.cat(ends.logits, dim=1), numbers))

    def report_tokens(self, reach: Reach, run: PassRun, op: Op) -> None:
        reach["target"].copy_(reach["source"], non_blocking=True)

    def take(self, reach: Reach, run: PassRun, op: Op) -> None:
        tokens = zip(reach.tensors("tokens"), run.numbers, strict=True)
        run.taken = _sequences(reach).take([held[: len(numbers)].tolist() for held, numbers in tokens])

    def _row_numel(self, run: PassRun, op: Op) -> int:
        """Elements of one position of a micro-batch."""
        return len(run.numbers[op.micro]) * self._kept_numel


def _sequences(reach: Reach) -> Sequences:
    sequences = reach.cell("sequences").value
    assert isinstance(sequences, Sequences)
    return sequences
