"""Work on host memory that must be fast: the optimizer's update, copies of rows, and blocks of files, in C++; with a
stand-in in torch for all but the last.

`load` is the door. What it returns is a `HostKernels`: the native library where there is one, else torch, slower but
bit for bit the same.
"""

from slideformer.native.disk import NativeDisk, ShortFile, Stopped
from slideformer.native.kernels import HostKernels, Parts, Planes, TorchKernels
from slideformer.native.library import NativeKernels
from slideformer.native.loader import available_cpus, load, load_disk

__all__ = [
    "HostKernels",
    "NativeDisk",
    "NativeKernels",
    "Parts",
    "Planes",
    "ShortFile",
    "Stopped",
    "TorchKernels",
    "available_cpus",
    "load",
    "load_disk",
]
