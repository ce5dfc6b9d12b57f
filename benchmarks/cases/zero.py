"""DeepSpeed's ZeRO-2 with the optimizer offloaded, and ZeRO-3 with parameters offloaded too, on one rank."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch

from cases import Settings
from cases.loop import open_torch_device, pinned_by_torch, run
from cases.stock import LR, build_model
from traffic import UpdateCount, torch_updates

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def config_of(settings: Settings, device: torch.device) -> dict[str, object]:
    stage = 2 if settings.case == "deepspeed-zero2" else 3
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    zero: dict[str, object] = {"stage": stage, "offload_optimizer": host, "overlap_comm": True}
    if stage == 3:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": settings.batch // settings.micro_batches,
        "gradient_accumulation_steps": settings.micro_batches,
        "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": device.type == "cuda"},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "steps_per_print": 2**31,
    }


class Zero:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, open_torch_device(settings)
        for name, value in (ONE_RANK | LOOPBACK | {"DS_SKIP_CUDA_CHECK": "1"}).items():
            os.environ.setdefault(name, value)
        if settings.cpu_threads:
            torch.set_num_threads(settings.cpu_threads)
        self.threads = torch.get_num_threads()
        import deepspeed

        deepspeed.init_distributed("nccl" if self.device.type == "cuda" else "gloo", verbose=False)
        model = build_model(settings, self.device, reentrant=settings.case == "deepspeed-zero3")
        self.vocab_size = model.config.vocab_size
        head = model.get_output_embeddings().weight
        self.engine, *_ = deepspeed.initialize(model=model, config=config_of(settings, self.device))
        if settings.case == "deepspeed-zero3":  # the fused loss reads the matrix outside the module it belongs to
            deepspeed.zero.register_external_parameter(self.engine.module, head)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for part in tokens.to(self.device, non_blocking=True).split(self.settings.batch // self.settings.micro_batches):
            loss = self.engine(input_ids=part, labels=part).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / self.settings.micro_batches
        return total

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def updates(self) -> AbstractContextManager[UpdateCount | None]:
        return torch_updates([self.engine.optimizer.optimizer])

    def pinned_nbytes(self) -> int:
        return pinned_by_torch()


def measure(settings: Settings) -> dict[str, object]:
    try:
        return run(Zero(settings), settings)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
