"""What a config means for the rooms below: device, model, engine options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from slideformer.config import TrainConfig
from slideformer.device.cuda import cuda_available
from slideformer.engine import EngineOptions, Offload
from slideformer.errors import BadInput
from slideformer.memory.disk_gds import require_kvikio
from slideformer.model.decoder import Decoder, PretrainedConfig
from slideformer.model.folder import read_config

MOST_TILES = 1 << 16
"""A plan has several ops a tile and lies in memory as a whole: 2 million tiles took 14 GB and minutes (135 M parameters
in tiles of 64; 2-core virtual machine, 2026-11-30)."""

CUBLAS_WORKSPACES, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""cuBLAS's own setting, and what of it torch takes for deterministic."""


@contextmanager
def determinism(config: TrainConfig) -> Iterator[None]:
    """With full_determinism torch's kernels that give the same bits twice, in this process until the end; to be entered
    before a GPU is first used. Raises BadInput where the user has told cuBLAS what excludes that."""
    if not config.full_determinism:
        yield
        return
    given = os.environ.setdefault(CUBLAS_WORKSPACES, DETERMINISTIC[0])
    if given not in DETERMINISTIC:
        allowed = " or ".join(DETERMINISTIC)
        what = f"{CUBLAS_WORKSPACES} is {given!r} in the environment, must be {allowed} for full_determinism"
        raise BadInput(f"{what}: unset it, or give full_determinism: false")
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing is read before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def compute_dtype(config: TrainConfig, device_kind: str) -> torch.dtype:
    """bf16 on a GPU and fp32 on a CPU, unless the config says."""
    wants_bf16 = device_kind == "cuda" if config.bf16 == "auto" else config.bf16
    return torch.bfloat16 if wants_bf16 else torch.float32


def build_decoder(
    config: TrainConfig, device_kind: str, device: torch.device, model_config: PretrainedConfig | None = None
) -> Decoder:
    """The model of the config's folder, without its weights. Raises BadInput: no folder, a refused model.

    model_config: of a model that comes from elsewhere.
    """
    decoder = Decoder(
        model_config or read_config(Path(config.model_name_or_path)),
        dtype=compute_dtype(config, device_kind),
        tile_numel=config.tile_numel,
        attn_implementation=config.attn_implementation,
        frozen=config.freeze,
        disable_dropout=config.disable_dropout,
        kernels=config.kernels,
        device=device,
    )
    tiles = sum(-(-unit.numel // config.tile_numel) for unit in decoder.layout.units)
    if tiles > MOST_TILES:
        least = -(-decoder.layout.numel // MOST_TILES)
        raise BadInput(
            f"tile_numel is {config.tile_numel}, which cuts the model's {decoder.layout.numel:,} parameters into "
            f"{tiles:,} tiles; there may be {MOST_TILES:,}: use at least {2 * least:,}, or leave it out"
        )
    return decoder


def device_kind(config: TrainConfig) -> str:
    """Of the device that a run would open here."""
    if config.device != "auto":
        return config.device
    return "cuda" if cuda_available() else "cpu"


def require_gds(config: TrainConfig, kind: str, *, elsewhere: bool = False) -> None:
    """Raise BadInput where use_gds asks for what is not there. kind: of the device. elsewhere: what is installed here
    does not count."""
    if not config.use_gds:
        return
    if kind == "cpu":
        raise BadInput(
            "use_gds is true, but the device is the CPU, and only a GPU has it: drop it, or use device: cuda"
        )
    if not elsewhere:
        require_kvikio()


def engine_options(config: TrainConfig) -> EngineOptions:
    """Sizes and rules for the engine. Evaluation batches use the same buffers, so the larger of both counts."""
    saved: dict[str | float, int | None | Literal["auto"]] = {"cpu": 0, "nvme": 0, "none": None}
    rows = (config.per_device_train_batch_size, config.per_device_eval_batch_size)
    shares = Offload(config.optimizer_on_disk, config.weights_on_disk, config.activations_on_disk)
    return EngineOptions(
        micro_batch_size=max(config.per_device_train_batch_size, config.eval_batch_size),
        max_length=config.max_length,
        micro_batches=config.gradient_accumulation_steps,
        find_micro_batch=config.auto_find_batch_size,
        asked_rows=rows if config.per_device_eval_batch_size else None,
        window=config.window,
        grad_slots=config.grad_slots,
        ring=config.ring,
        saved_on_device=saved.get(config.offload_activations, "auto"),
        offload=None if config.offload_dir is None else shares,
        offload_dir=config.offload_dir,
        keep_offload_dir=config.keep_offload_dir,
        reuse_offload_dir=config.reuse_offload_dir,
        gds=config.use_gds,
        resident={"auto": "auto", "stream": (), "resident": "all"}[config.placement],
        keep=() if config.placement == "stream" else "auto",
        ahead="auto" if config.update_ahead == "auto" else (),
        update=config.update_program,
        max_grad_norm=config.max_grad_norm,
        on_nonfinite=config.on_nonfinite,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        cpu_threads=config.cpu_threads,
        max_gpu_memory=config.max_gpu_memory,
        max_host_memory=config.max_host_memory,
        ignore_memory_limits=config.ignore_memory_limits,
    )


def save_dtype(config: TrainConfig, decoder: Decoder) -> torch.dtype:
    """Of the saved weights: as in the model's own config, or fp32 where it does not say."""
    if config.save_dtype == "auto":
        return decoder.config.dtype or torch.float32
    return torch.float32 if config.save_dtype == "float32" else torch.bfloat16
