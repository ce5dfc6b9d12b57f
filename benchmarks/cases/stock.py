"""The stock model on the GPU: transformers with Liger's kernels, SDPA, every block checkpointed.

`stock-fwd-bwd` has no optimizer. `stock-resident` is the ceiling: bf16 weights and fp32 masters with torch's fused
AdamW. `stock-resident-bf16` steps the bf16 weights themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cases import NotHere, Settings
from cases.loop import no_count, open_torch_device, run
from shapes import random_tokens, random_weight, shape
from traffic import UpdateCount, torch_updates

LR = 1e-5

GROUP_NUMEL = 1 << 28
"""Parameters whose fp32 gradients exist at once in the ceiling's step: 1 GiB, so that the peak stays the model's."""


def build_model(
    settings: Settings,
    device: torch.device,
    *,
    fused_head: bool = True,
    reentrant: bool = False,
    checkpoint: bool = True,
) -> PreTrainedModel:
    """The model that every case trains, on `device`; bf16 on CUDA, fp32 on a CPU.

    fused_head: Liger's loss, which never holds the logits. reentrant: which of torch's two ways to checkpoint blocks.
    """
    config = shape(settings.shape, num_layers=settings.num_layers)
    config.use_cache = False
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if device.type == "cuda" and settings.liger:
        _apply_liger(model, fused_head=fused_head)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(random_weight(name, tuple(param.shape), device))
    model.train()
    if checkpoint:
        # The older name says in transformers 5.24 that it will go; the newer one is not in 5.17 yet.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
    return model


def _apply_liger(model: PreTrainedModel, *, fused_head: bool) -> None:
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise NotHere("liger-kernel is not installed; install it, or pass --no-liger") from None
    options = {} if fused_head else {"fused_linear_cross_entropy": False, "cross_entropy": True}
    _apply_liger_kernel_to_instance(model=model, **options)


def mean_loss(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    settings: Settings,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Forward and backward of a step in its micro-batches; the loss of all, on the device. between: called between a
    forward pass and its backward pass."""
    total = torch.zeros((), device=device)
    for part in tokens.to(device, non_blocking=True).split(settings.batch // settings.micro_batches):
        loss = model(input_ids=part, labels=part).loss / settings.micro_batches
        between()
        loss.backward()
        total += loss.detach()
    return total


class Masters:
    """fp32 masters and moments beside bf16 weights, all on the device: groups of parameters, a fused AdamW each."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self._groups: list[tuple[list[torch.nn.Parameter], list[torch.Tensor], torch.optim.AdamW]] = []
        for group in _groups(params, GROUP_NUMEL):
            masters = [p.detach().to(torch.float32, copy=True) for p in group]
            self._groups.append((group, masters, adamw(masters)))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, _, optimizer in self._groups]

    @torch.no_grad()
    def step(self) -> None:
        for params, masters, optimizer in self._groups:
            for param, master in zip(params, masters, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
            optimizer.step()
            torch._foreach_copy_(params, masters)
            optimizer.zero_grad(set_to_none=True)


def _groups(params: list[torch.nn.Parameter], most: int) -> list[list[torch.nn.Parameter]]:
    groups: list[list[torch.nn.Parameter]] = [[]]
    for param in params:
        if groups[-1] and sum(p.numel() for p in groups[-1]) + param.numel() > most:
            groups.append([])
        groups[-1].append(param)
    return groups


def adamw(params: list[torch.Tensor] | list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of every case that runs torch's: same numbers as ours."""
    for param in params:
        param.requires_grad_()
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.0, fused=True)


class Stock:
    threads = 0

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, open_torch_device(settings)
        self.model = build_model(settings, self.device)
        self.vocab_size = self.model.config.vocab_size
        self.params = list(self.model.parameters())
        self.masters = Masters(self.params) if settings.case == "stock-resident" else None
        self.plain = adamw(self.params) if settings.case == "stock-resident-bf16" else None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(self.model, tokens, self.settings, self.device)
        if self.settings.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.params, self.settings.max_grad_norm)
        if self.masters is not None:
            self.masters.step()
        elif self.plain is not None:
            self.plain.step()
        self.model.zero_grad(set_to_none=True)
        return loss

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def updates(self) -> AbstractContextManager[UpdateCount | None]:
        if self.masters is not None:
            return torch_updates(self.masters.optimizers)
        return no_count() if self.plain is None else torch_updates([self.plain])

    def pinned_nbytes(self) -> int:
        return 0


def measure(settings: Settings) -> dict[str, object]:
    peer = Stock(settings)
    line = run(peer, settings)
    return line | {"forward_s": _forward_s(peer)} if settings.case == "stock-fwd-bwd" else line


def _forward_s(peer: Stock) -> float:
    """Seconds of the forward pass of a step: the median of five, each alone on the device."""
    settings, times = peer.settings, []
    tokens = random_tokens(0, settings.batch, settings.seq, peer.vocab_size)
    for _ in range(5):
        peer.synchronize()
        marks = [time.perf_counter()]

        def between(marks: list[float] = marks) -> None:
            peer.synchronize()
            marks.append(time.perf_counter())

        mean_loss(peer.model, tokens, settings, peer.device, between)
        peer.model.zero_grad(set_to_none=True)
        times.append(marks[1] - marks[0])
    return settings.micro_batches * float(f"{statistics.median(times):.5g}")
