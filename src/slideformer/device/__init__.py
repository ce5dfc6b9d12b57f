"""Where lanes run: one protocol, a CPU backend that is truly asynchronous, and a CUDA backend."""

from slideformer.device.api import Device, Lane, LaneFailure, Mark, open_device, require_device

__all__ = ["Device", "Lane", "LaneFailure", "Mark", "open_device", "require_device"]
