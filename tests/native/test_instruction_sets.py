"""The library is there, and every instruction set of this machine runs."""

import torch

from native.states import HYPER, State, any_bits, assert_same_bits, instruction_sets
from slideformer.native import NativeKernels, load
from slideformer.optim import reference_update


def test_the_native_library_is_loaded():
    """`load` takes no library but one built from the sources in this tree."""
    assert isinstance(load(1), NativeKernels), "no native library of these sources: make native"


def test_every_instruction_set_of_the_machine_equals_the_reference(generator: torch.Generator):
    before = State(100_003, torch.bfloat16, any_bits, generator)
    expected = before.clone()
    reference_update(*expected.args(), HYPER)
    executed = set()
    for isa in load(1).isas:
        found = before.clone()
        with load(2, isa=isa) as kernels:
            kernels.update(*found.args(), HYPER)
            executed.add(kernels.isa)
        assert_same_bits(found, expected)
    assert executed == set(instruction_sets())


def test_the_default_is_the_widest_instruction_set():
    assert load(1).isa == instruction_sets()[-1]
