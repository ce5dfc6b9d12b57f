"""Settings of the disk tier: what of a run's state lies on NVMe, where, and how much may be written there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slideformer.config.values import Nbytes, Settings

Share = Annotated[float, Field(ge=0, le=1)]  # of the bytes that would lie on the host


class DiskSettings(Settings):
    """What lies on the disk. cpu: nothing of it, nvme: all of it, a number: that share; auto: with an offload_dir as
    much as the host has no room for."""

    offload_optimizer: Literal["auto", "cpu", "nvme"] | Share = "auto"  # both moments: 8 bytes a parameter
    offload_weights: Literal["auto", "cpu", "nvme"] | Share = "auto"  # both planes of the masters: 4 bytes a parameter
    offload_activations: Literal["auto", "cpu", "nvme", "none"] | Share = "auto"  # saved inputs; none: on the device
    offload_dir: str | None = None  # a folder on the disk; what is put there is removed at the end
    keep_offload_dir: bool = False  # leave it there
    reuse_offload_dir: bool = False  # remove what a killed run left there, for runs that are started again unattended
    use_gds: bool = False  # GPUDirect Storage: saved inputs and weights go between disk and GPU past the host's memory
    disk_tbw: float | None = Field(
        None, gt=0, allow_inf_nan=False
    )  # terabytes that the disk may be written by its maker's word
    max_disk_writes: Nbytes | None = None  # bytes that this run may write to the disk tier; then it stops

    @property
    def optimizer_on_disk(self) -> float | None:
        """The share of the moments that lies on the disk, 0 to 1; None: as much as the host has no room for."""
        return self._on_disk(self.offload_optimizer)

    @property
    def weights_on_disk(self) -> float | None:
        """The same of the masters' planes."""
        return self._on_disk(self.offload_weights)

    @property
    def activations_on_disk(self) -> float | None:
        """The same of the saved inputs without room on the device."""
        return self._on_disk(self.offload_activations)

    def _on_disk(self, value: str | float) -> float | None:
        if value == "auto" and self.offload_dir is not None:
            return None
        return {"nvme": 1.0}.get(value, 0.0) if isinstance(value, str) else value
