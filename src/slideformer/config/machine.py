"""Settings of the machine: what runs where, and what it may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slideformer.config.values import Nbytes, Settings

Blocks = Annotated[int, Field(ge=1)]


class MachineSettings(Settings):
    """What runs where, and what it may take."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    bf16: Literal["auto"] | bool = "auto"  # auto: on a GPU yes, on a CPU no (fp32 is faster there on most of them)
    window: Literal["auto"] | Blocks = "auto"  # blocks on the device at a time; auto: 2, or 1 where 2 have no room
    tile_numel: int = Field(16 * 2**20, ge=1)  # elements of one transfer and update; 32 MiB as bf16
    grad_slots: int = Field(2, ge=1)
    ring: int = Field(4, ge=2)  # staging buffers of one tile
    update_ahead: Literal["auto", "none"] = "auto"  # second copies of some state, where clipping would cost time
    placement: Literal["auto", "stream", "resident"] = "auto"  # auto: on a GPU what has room there and is fastest
    max_gpu_memory: Nbytes | None = None
    max_host_memory: Nbytes | None = None
    ignore_memory_limits: bool = False  # warn instead of ending where a limit will be exceeded
    cpu_threads: int | None = Field(None, ge=1, le=1024)
