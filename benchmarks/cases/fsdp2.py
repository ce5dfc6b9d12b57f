"""PyTorch's FSDP2 on one rank, all state offloaded: `fully_shard` per block, `CPUOffloadPolicy`, fused CPU AdamW.

Parameters, gradients and moments are fp32 on the host; blocks are gathered to the device in bf16.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from cases import Settings
from cases.loop import open_torch_device, pinned_by_torch, run
from cases.stock import adamw, build_model, mean_loss
from traffic import UpdateCount, torch_updates


class Fsdp2:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, open_torch_device(settings)
        cuda = self.device.type == "cuda"
        if settings.cpu_threads:
            torch.set_num_threads(settings.cpu_threads)
        self.threads = torch.get_num_threads()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # the norm of offloaded gradients is reduced on the host
        for library in ("GLOO", "NCCL"):  # machines without a network cannot resolve their own name
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        if cuda:
            torch.cuda.set_device(0)
        model = build_model(settings, self.device).to("cpu", torch.float32)
        mesh = init_device_mesh(self.device.type, (1,))
        options = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
        }
        for block in model.model.layers:
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.vocab_size = model.config.vocab_size
        self.params = list(self.model.parameters())
        self.optimizer = adamw(self.params)
        if cuda:
            torch.cuda.empty_cache()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(self.model, tokens, self.settings, self.device)
        if self.settings.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.params, self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def updates(self) -> AbstractContextManager[UpdateCount | None]:
        return torch_updates([self.optimizer])

    def pinned_nbytes(self) -> int:
        return pinned_by_torch()


def measure(settings: Settings) -> dict[str, object]:
    try:
        return run(Fsdp2(settings), settings)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
