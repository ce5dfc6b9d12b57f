"""MegaTrain from a checkout, as its own training script calls it: bf16 weights, fp32 moments, DeepSpeed's CPU Adam.

It computes loss and backward itself, a block again from every fourth input, and copies updated weights back between
steps. Without the package flash-attn its attention is SDPA here, as everybody's.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

import torch

from cases import NotHere, Settings
from cases.loop import open_torch_device, pinned_by_torch, run
from cases.stock import LR, build_model
from traffic import UpdateCount, torch_updates


class MegaTrain:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, open_torch_device(settings)
        if self.device.type != "cuda":
            raise NotHere("MegaTrain needs a CUDA device")
        if settings.micro_batches != 1:
            raise NotHere("MegaTrain is measured with one micro-batch")
        if settings.cpu_threads:
            torch.set_num_threads(settings.cpu_threads)
        self.threads = torch.get_num_threads()
        sys.path.insert(0, str(settings.megatrain))
        try:
            from infinity import CPUMasterModel
            from infinity.config import CPUMasterConfig
        except ImportError as error:
            raise NotHere(f"MegaTrain's checkout cannot be imported: {error}") from error
        config = CPUMasterConfig(
            model_name=settings.shape,
            attn_implementation="sdpa",
            dataset_path="none",
            max_seq_len=settings.seq,
            batch_size=settings.batch,
            learning_rate=LR,
            weight_decay=0.0,
        )
        model = build_model(settings, self.device, fused_head=False, checkpoint=False).cpu()
        torch.cuda.empty_cache()
        self.vocab_size = model.config.vocab_size
        self.model = CPUMasterModel(model, config)
        self.params = self.model.get_parameters()
        self.optimizer = _cpu_adam(self.params)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss, _, _ = self.model.forward_and_backward(tokens, torch.ones_like(tokens), tokens)
        if self.settings.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.params, self.settings.max_grad_norm)
        self.optimizer.step()
        self.model._sync_params_to_gpu()
        self.model.zero_grad()
        self.optimizer.zero_grad()
        return torch.tensor(loss)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def updates(self) -> AbstractContextManager[UpdateCount | None]:
        return torch_updates([self.optimizer])

    def pinned_nbytes(self) -> int:
        return pinned_by_torch()


def _cpu_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        raise NotHere("MegaTrain is measured with DeepSpeed's CPU Adam: pip install deepspeed") from None
    return DeepSpeedCPUAdam(params, lr=LR, weight_decay=0.0, adamw_mode=True)


def measure(settings: Settings) -> dict[str, object]:
    return run(MegaTrain(settings), settings)
