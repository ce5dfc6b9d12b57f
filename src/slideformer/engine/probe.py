"""Runs one block of each kind and the head once on the device, with weights of no meaning, to see what they take.

A model's own code decides how long a block runs and what it keeps for backward; no formula knows. A few
seconds of measuring, before anything large is allocated, give the plan's clock and its working memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slideformer.device import Device
from slideformer.engine.backward import gradients
from slideformer.engine.costs import HOST_LIBRARY_NBYTES, BlockCost, Costs, HeadCost, Rates
from slideformer.engine.options import EngineOptions
from slideformer.engine.rates import device_rate, gather_rate, link_rate, update_rate
from slideformer.errors import DoesNotFit
from slideformer.kernels.linear_cross_entropy import SlicedLoss, Softmax, loss_and_grads, loss_only
from slideformer.layout import UnitKind
from slideformer.model.decoder import Decoder
from slideformer.native import HostKernels

SCALE = 0.02  # of random weights: activations stay finite through one block
NUM_ROWS = 1024  # of the table that the random tokens come from
UPDATE_NUMEL = 1 << 26  # 0.94 GB of state and gradient: the rate of memory, not of caches


def probe(decoder: Decoder, device: Device, options: EngineOptions, kernels: HostKernels) -> Costs:
    """Costs of full micro-batches on this device, measured. Takes some seconds and gives all its memory back.

    Raises DoesNotFit when not even one block runs in the device's memory.
    """
    try:
        rates = Rates(
            flops=0.0,  # found below: of a block, as it trains
            link_nbytes=link_rate(device),
            update_numel=update_rate(kernels, UPDATE_NUMEL),
            host_nbytes=gather_rate(kernels),
            device_nbytes=device_rate(device),
        )
        library_nbytes = device.library_nbytes(decoder.dtype)
        trial = _Trial(decoder, device, options)
        blocks = _blocks(decoder, trial)
        head, sliced_head = trial.try_whole_head(), trial.sliced_head()
    except torch.OutOfMemoryError:
        raise DoesNotFit(
            f"one block does not run on the device with {options.micro_batch_size} x {options.max_length} tokens: "
            "lower per_device_train_batch_size or max_length, or raise max_gpu_memory"
        ) from None
    finally:
        device.release_libraries()  # of this thread: the model runs in another, on a stream of its own
    tokens, units = options.micro_batch_size * options.max_length, decoder.layout.units
    numel = sum(units[u].numel for u in decoder.layout.blocks)
    rates = replace(rates, flops=8 * numel * tokens / sum(b.forward_s + b.backward_s for b in blocks))
    return Costs(
        rates,
        blocks,
        head,
        sliced_head,
        measured=True,
        library_nbytes=library_nbytes,
        host_library_nbytes=HOST_LIBRARY_NBYTES[device.kind],
        call_nbytes=trial.call.nbytes,
    )


def _blocks(decoder: Decoder, trial: _Trial) -> tuple[BlockCost, ...]:
    """Blocks of one kind, shape and trained parameters take alike."""
    found: dict[tuple[object, ...], BlockCost] = {}
    blocks = []
    for index, unit in enumerate(decoder.layout.blocks):
        params = decoder.layout.units[unit].params
        kind = (decoder.block_kind(index), *((p.shape, p.trainable) for p in params))
        if kind not in found:
            found[kind] = trial.block(unit)
        blocks.append(found[kind])
    return tuple(blocks)


class _Trial:
    """One micro-batch of random tokens, up to the first block."""

    def __init__(self, decoder: Decoder, device: Device, options: EngineOptions) -> None:
        self.decoder, self.device = decoder, device
        self.rows, self.length = options.micro_batch_size, options.max_length
        glue = decoder.layout.find(UnitKind.GLUE)
        params = {} if glue is None else decoder.views(glue, self.random(decoder.layout.units[glue].numel))
        ids = torch.randint(NUM_ROWS, (self.rows, self.length), device=device.torch_device)
        table = self.random(NUM_ROWS * decoder.hidden_size).view(NUM_ROWS, -1)
        with torch.no_grad():
            self.hidden, self.call = decoder.embed(table, params, ids, padding_row=None)

    def random(self, numel: int) -> torch.Tensor:
        flat = torch.empty(numel, dtype=self.decoder.dtype, device=self.device.torch_device)
        return flat.normal_(0.0, SCALE)

    def block(self, unit: int) -> BlockCost:
        layout_unit, decoder, call = self.decoder.layout.units[unit], self.decoder, self.call
        trains = layout_unit.train_numel > 0
        params = decoder.views(unit, self.random(layout_unit.numel), requires_grad=trains)
        plain = {name: p.detach() for name, p in params.items()}
        leaves = [p for p in params.values() if p.requires_grad]
        grads = [torch.empty_like(p) for p in leaves]
        target = torch.empty_like(self.hidden)

        def forward() -> None:
            with torch.no_grad():
                target.copy_(decoder.forward(unit, plain, self.hidden, call))

        def kept_forward() -> tuple[torch.Tensor, torch.Tensor]:
            x = self.hidden.clone().requires_grad_()
            with torch.enable_grad():
                out = decoder.forward(unit, params, x, call)
            target.copy_(out.detach())
            return x, out

        def backward(x: torch.Tensor, out: torch.Tensor) -> None:
            found = gradients(out, [*leaves, x], self.hidden)
            target.copy_(found[-1])
            torch._foreach_copy_(grads, list(found[:-1])) if leaves else None

        def rerun() -> None:
            x = self.hidden.detach().requires_grad_()
            with torch.enable_grad():
                out = decoder.rerun(unit, params, x, call)
            backward(x, out)

        measure = self.device.measure
        kept = measure(kept_forward)
        both = measure(lambda: backward(*kept_forward()))
        again = measure(rerun)
        return BlockCost(
            forward_s=measure(forward).seconds,
            backward_s=again.seconds,
            kept_forward_s=kept.seconds,
            kept_backward_s=max(both.seconds - kept.seconds, 0.0),
            workspace_nbytes=again.peak_nbytes,
            kept_workspace_nbytes=both.peak_nbytes - kept.held_nbytes,
            kept_nbytes=kept.held_nbytes,
        )

    def try_whole_head(self) -> HeadCost | None:
        """`head`, or None where it has no room. What the failed try held is free again when this returns."""
        try:
            return self.head()
        except torch.OutOfMemoryError:
            return None

    def head(self) -> HeadCost:
        """Final norm, projection and loss as an engine runs them, every position with a target."""
        decoder, softmax = self.decoder, Softmax(self.decoder.projection.scale, self.decoder.projection.softcap)
        weight = self.random(decoder.vocab_size * decoder.hidden_size).view(decoder.vocab_size, -1)
        top = self.hidden.flatten(0, 1)
        targets = torch.arange(top.shape[0], device=top.device)
        labels = torch.randint(decoder.vocab_size, targets.shape, device=top.device)
        trains = decoder.layout.units[decoder.layout.output].train_numel > 0
        total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device) if trains else None
        params, leaves = self._final()
        full = torch.empty_like(top)

        def head() -> None:
            hidden = top.index_select(0, targets).requires_grad_()
            normed = decoder.final(params, hidden)
            with torch.no_grad():
                _, grad = loss_and_grads(
                    normed.detach(),
                    weight,
                    None,
                    labels,
                    softmax,
                    denominator=float(labels.numel()),
                    weight_sum=total,
                    bias_sum=None,
                    overwrite=True,
                )
            full.zero_().index_copy_(0, targets, gradients(normed, [hidden, *leaves], grad)[0])

        def loss() -> None:
            with torch.no_grad():
                loss_only(decoder.final(params, top.index_select(0, targets)), weight, None, labels, softmax)

        whole = self.device.measure(head)
        return HeadCost(whole.seconds, self.device.measure(loss).seconds, whole.peak_nbytes)

    def _final(self) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Parameters of the final unit, and those that have a gradient through the final norm."""
        decoder, unit = self.decoder, self.decoder.layout.find(UnitKind.FINAL)
        if unit is None:
            return {}, []
        params = decoder.views(unit, self.random(decoder.layout.units[unit].numel), requires_grad=True)
        return params, [p for name, p in params.items() if p.requires_grad and name != decoder.projection.bias]

    def sliced_head(self) -> HeadCost:
        """From one tile of the projection, times their number."""
        decoder, layout = self.decoder, self.decoder.layout
        tiles, width = layout.tiles(layout.output), decoder.hidden_size
        weight = self.random(tiles[0].numel).view(-1, width)
        total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        hidden = self.hidden.flatten(0, 1)
        labels = torch.randint(decoder.vocab_size, hidden.shape[:1], device=hidden.device)
        softmax = Softmax(decoder.projection.scale, decoder.projection.softcap)
        seen = SlicedLoss(hidden, labels, softmax, denominator=float(labels.numel()))
        with torch.no_grad():
            see = self.device.measure(lambda: seen.see(0, weight, None))
            seen.loss()
            grads = self.device.measure(
                lambda: seen.grads(0, weight, None, weight_sum=total, bias_sum=None, overwrite=True)
            )
        params, leaves = self._final()

        def close() -> None:
            x = hidden.detach().requires_grad_()
            gradients(decoder.final(params, x), [x, *leaves], hidden)

        nbytes = max(see.peak_nbytes, grads.peak_nbytes, self.device.measure(close).peak_nbytes)
        return HeadCost(len(tiles) * grads.seconds, len(tiles) * see.seconds, nbytes)
