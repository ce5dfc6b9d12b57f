"""The specification of the update gives the same bits on the GPU."""

import pytest
import torch

from native.states import GRAD_DTYPES, HYPER, State, any_bits, assert_same_bits, mixed, near_flushing, ordinary
from slideformer.optim import reference_update


@pytest.mark.parametrize("values", [ordinary, any_bits, near_flushing, mixed])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_the_specification_gives_the_same_bits_on_cuda(grad_dtype, values, generator: torch.Generator):
    expected = State(300_001, grad_dtype, values, generator)
    found = expected.clone()
    on_gpu = [None if tensor is None else tensor.cuda() for tensor in found.args()]
    for _ in range(2):
        reference_update(*expected.args(), HYPER)
        reference_update(*on_gpu, HYPER)
    for plane, computed in zip(found.args(), on_gpu, strict=True):
        if plane is not None:
            plane.copy_(computed)
    assert_same_bits(found, expected)
