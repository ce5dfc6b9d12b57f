"""Work on host memory that must be fast: the optimizer's update and copies of rows, in C++ with a torch stand-in.

`load` is the door. What it returns is a `HostKernels`: the native library where there is one, else torch, slower but
bit for bit the same.
"""

from slideformer.native.kernels import HostKernels, Planes, TorchKernels
from slideformer.native.library import NativeKernels
from slideformer.native.loader import available_cpus, load

__all__ = ["HostKernels", "NativeKernels", "Planes", "TorchKernels", "available_cpus", "load"]
