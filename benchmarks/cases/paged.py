"""TrainStream with every block's weights paged, gradients and fp32 moments on the host, fp32 masters.

Blocks are checkpointed as in every case, so its own paging of activations is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from cases import NotHere, Settings
from cases.loop import open_torch_device, run
from cases.stock import adamw, build_model, mean_loss
from slideformer.native import available_cpus
from traffic import UpdateCount


class TrainStream:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, open_torch_device(settings)
        if self.device.type != "cuda":
            raise NotHere("trainstream needs a CUDA device")
        import trainstream

        self._library = trainstream
        model = build_model(settings, self.device)
        self.vocab_size = model.config.vocab_size
        self.model, self.optimizer = trainstream.wrap(
            model,
            adamw(list(model.parameters())),
            blocks=list(model.model.layers),
            offload=True,
            param_offload=True,
            activation_offload=False,
            moment_dtype="float32",
            quantize="none",
            accumulation_steps=settings.micro_batches,
            max_grad_norm=settings.max_grad_norm or None,
            threads=settings.cpu_threads,
            profile=False,
            check_memory=False,  # it asks MemAvailable, which says too little where memory appears as it is touched
        )
        torch.cuda.empty_cache()
        self.threads = settings.cpu_threads or available_cpus()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(self.model, tokens, self.settings, self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def synchronize(self) -> None:
        self.optimizer.synchronize()
        torch.cuda.synchronize()

    def updates(self) -> AbstractContextManager[UpdateCount | None]:
        return self._count()

    @contextmanager
    def _count(self) -> Iterator[UpdateCount]:
        """By the step that its engine keeps for each tensor."""
        engine, params, count = self.optimizer.engine, self.optimizer._slot_params, UpdateCount()
        before = [engine.get_step(slot) for slot in range(len(params))]
        yield count
        after = [engine.get_step(slot) for slot in range(len(params))]
        count.others = sum(p.numel() for p, a, b in zip(params, before, after, strict=True) if b > a)

    def pinned_nbytes(self) -> int:
        return int(self._library.pinned_stats()["peak_live_bytes"])


def measure(settings: Settings) -> dict[str, object]:
    return run(TrainStream(settings), settings)
