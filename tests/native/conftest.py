from collections.abc import Iterator
from contextlib import closing

import pytest

from native.states import instruction_sets
from slideformer.native import NativeKernels, load


@pytest.fixture(params=instruction_sets())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    """Native kernels on three threads, once for every instruction set of this machine."""
    loaded = load(3, isa=request.param)
    assert isinstance(loaded, NativeKernels), "the native library is not there: make native"
    with closing(loaded):
        yield loaded
