"""Whatever fails in a pass of generation, the caller hears of it within a second, and nothing hangs."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from engine.test_reach import OPTIONAL, missed, without
from engine.toys import HookedDevice, tiny_decoder, write_weights
from engine.trouble import Boom, first_of_each_kind
from slideformer.device import LaneFailure
from slideformer.engine.generation import Generation, options_of, pass_options, shape_of
from slideformer.memory import State
from slideformer.model.sampling import Sampling
from slideformer.native import load
from slideformer.schedule import OpKind, PassOptions, Plan, PlanError, build_pass, prove

PROMPTS, NEW = [[3, 4, 5], [6, 7], [8]], Sampling(max_new_tokens=4)


def decoder():
    return tiny_decoder(blocks=2, tile=300)


def options() -> PassOptions:
    model = decoder()
    shape = replace(shape_of(model, [3] * 4, 4, 1000), rows=2, micro_batches=2)
    return replace(pass_options(shape, model.layout), cached_on_device=1, cache_ring=1, hidden_pool=0)


def plans() -> tuple[Plan, Plan]:
    return tuple(build_pass(decoder().layout.untrained(), options_of(options(), 2, first=f)) for f in (True, False))


FIRST, LATER = (first_of_each_kind(plan) for plan in plans())
KINDS = {*FIRST, *LATER}
PLACES = [("first", kind) for kind in FIRST] + [("later", kind) for kind in LATER]


def made(device: HookedDevice, kernels) -> Generation:
    model = decoder()
    layout = model.layout.untrained()
    shape = replace(shape_of(model, [3] * 4, 4, 1000), rows=2, micro_batches=2)
    state = State(layout, device, kernels, keep_residual=True)
    write_weights(layout, state)
    return Generation(model, device, kernels, state, shape, options(), {})


@pytest.mark.parametrize(("which", "kind"), PLACES, ids=str)
def test_an_exception_in_any_op_is_raised_in_the_caller_within_a_second(which: str, kind: OpKind):
    first, later = plans()
    plan, index = (first, FIRST[kind]) if which == "first" else (later, LATER[kind])
    at = index if which == "first" else len(first.ops) + len(later.ops) + index  # in the second later pass
    raised_s: list[float] = []

    def before(number: int) -> None:
        if number == at:
            raised_s.append(time.perf_counter())
            raise Boom("it broke")

    with HookedDevice(before=before, poison=True) as device, closing(load(1)) as kernels:
        generation = made(device, kernels)
        with pytest.raises(LaneFailure) as caught:
            generation.run(PROMPTS, NEW)
        assert time.perf_counter() - raised_s[0] < 1.0
        assert (caught.value.lane, caught.value.label) == (plan.ops[index].lane, str(plan.ops[index]))
        assert isinstance(caught.value.__cause__, Boom)
        assert not generation.usable
        with pytest.raises(LaneFailure) as again:
            generation.run(PROMPTS, NEW)
        assert again.value is caught.value


def test_every_role_that_an_op_does_not_declare_is_out_of_reach():
    with HookedDevice() as device, closing(load(1)) as kernels:
        generation = made(device, kernels)
        generation.run(PROMPTS, NEW)
        _, run = generation.executor._last
        for plan, first in zip(plans(), (True, False), strict=True):
            for kind, role in dict.fromkeys((op.kind, a.role) for op in plan.ops for a in op.accesses):
                broken, index = without(plan, kind, role)
                with pytest.raises(PlanError):
                    prove(broken, generation.layout, options_of(options(), 2, first=first))
                if (kind, role) not in OPTIONAL:
                    assert role in missed(generation, broken.ops[index], run), f"{broken.ops[index]} without {role}"


def test_slow_work_in_any_lane_changes_no_token():
    found = []
    for slow in (None, *sorted({str(op.lane) for plan in plans() for op in plan.ops})):
        with HookedDevice(poison=True) as device, closing(load(1)) as kernels:
            generation = made(device, kernels)
            lane = next((x for name, x in generation.executor.lanes.items() if name == slow), None)
            if lane is not None:
                lane._jitter = lambda: 2e-3
            found.append(generation.run(PROMPTS, NEW).tokens)
    assert len(found) > 6 and len(set(found)) == 1
    assert all(isinstance(token, int) for tokens in found[0] for token in tokens)
    assert torch.tensor(found[0]).shape == (3, 4)
