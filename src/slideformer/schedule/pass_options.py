"""What a pass of text generation depends on besides the layout."""

from __future__ import annotations

from dataclasses import dataclass

from slideformer.schedule.options import StepOptions


@dataclass(frozen=True, slots=True)
class PassOptions(StepOptions):
    """Of StepOptions only what a forward has counts.

    first: whole prompts, no keys and values yet. cached_on_device: so many pairs of block and micro-batch, blocks from
    the bottom, keep their keys and values on the device. cache_ring: positions through which the others pass.
    """

    first: bool = True
    cached_on_device: int = 0
    cache_ring: int = 3

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        if self.cached_on_device < 0:
            raise ValueError(f"cached_on_device is {self.cached_on_device}, must be at least 0")
        if self.cache_ring < 1:
            raise ValueError(f"cache_ring is {self.cache_ring}, must be at least 1")
