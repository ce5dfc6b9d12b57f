"""An action reaches what its op declares, by role, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.toys import (
    DISK_DIR,
    EAGER,
    LR,
    engine_on,
    on_disk,
    plans_of,
    tiny_batch,
    tiny_decoder,
    toy_batch,
    toy_decoder,
    toy_options,
    use_plan,
    write_weights,
)
from slideformer.device import LaneFailure
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Engine
from slideformer.engine.reach import Reach
from slideformer.engine.run import Run
from slideformer.schedule import Op, OpKind, PassOptions, Plan, PlanError, pass_ops, prove

SPILLING = {"saved_on_device": 1, "hidden_ring": 2, "micro_batches": 2}
AHEAD = {"update": "deferred", "max_grad_norm": 100.0, "ahead": (0, 1)}
SETTINGS = {
    "eager, tied, positions": (dict(family="gpt2", tied=True, dtype=torch.bfloat16), {**EAGER, **SPILLING}),
    "eager, untied": (dict(family="llama", tied=False, dtype=torch.float32), EAGER),
    "ahead": (dict(family="llama", tied=True, dtype=torch.bfloat16), {**AHEAD, **SPILLING}),
    "deferred, nothing ahead": (dict(family="llama", tied=True, dtype=torch.float32), {**AHEAD, "ahead": ()}),
    "sliced head": (
        dict(family="llama", tied=True, dtype=torch.bfloat16, tile=3000),
        {**EAGER, **SPILLING, "sliced_head": True},
    ),
    "disk": (
        dict(family="llama", tied=False, dtype=torch.float32),
        {
            **EAGER,
            **SPILLING,
            "disk": on_disk(toy_decoder(tied=False)),
            "disk_ring": 1,
            "saved_on_disk": 99,
            "saved_on_device": 0,
            "offload_dir": DISK_DIR,
        },
    ),
    "resident": (
        dict(family="llama", tied=True, dtype=torch.bfloat16),
        {**EAGER, **SPILLING, "resident": (0, 1, 3, 5), "keep": (1,)},
    ),
}
OPTIONAL = {
    (OpKind.GATHER, "residual"), (OpKind.UPLOAD, "residual"), (OpKind.EMBED, "glue"),
    (OpKind.HEAD, "output_grad"), (OpKind.HEAD, "final_grad"), (OpKind.HEAD, "hidden_grad"),
    (OpKind.BACKWARD, "grad"), (OpKind.BACKWARD_KEPT, "grad"), (OpKind.UPDATE_RESIDENT_TABLE, "grad"),
    (OpKind.HEAD_OPEN, "final"), (OpKind.HEAD_SEE, "final"), (OpKind.HEAD_GRADS, "final"),
    (OpKind.HEAD_GRADS, "grad"), (OpKind.HEAD_CLOSE, "hidden_grad"), (OpKind.HEAD_CLOSE, "final_grad"),
    (OpKind.UPLOAD, "slice"), (OpKind.DOWNLOAD, "slice"),
    (OpKind.REDUCE_SLICE, "batch"), (OpKind.REDUCE_SLICE, "row_grad"),
    (OpKind.EMBED_BACKWARD, "glue"), (OpKind.EMBED_BACKWARD, "row_grad"), (OpKind.EMBED_BACKWARD, "glue_grad"),
    (OpKind.REDUCE, "sum"), (OpKind.REDUCE_OUTPUT, "sum"), (OpKind.REDUCE_ROWS, "sum"),
    (OpKind.REDUCE_OUTPUT, "row_grad"), (OpKind.REDUCE_OUTPUT, "batch"),
    (OpKind.UPDATE, "norms"), (OpKind.UPDATE_REST, "norms"), (OpKind.UPDATE_ROWS, "norms"),
    (OpKind.UPDATE_REST, "grad"), (OpKind.REST_AHEAD, "grad"), (OpKind.SETTLE_ROWS, "grad"),
    (OpKind.UPDATE_TABLE, "grad"),
    (OpKind.UPDATE_AHEAD, "norms"), (OpKind.REST_AHEAD, "norms"), (OpKind.COMPLETE, "residual"),
    (OpKind.COMPLETE_ROWS, "residual"), (OpKind.COMPLETE_ROWS, "grad"),
}  # fmt: skip
"""What some ops of a kind have and others have not, and so an action asks for. Only the proof knows when it must be
there."""


DECLARED_ONLY = {(OpKind.TOTAL, "verdict"), (OpKind.UPLOAD, "other_rows"), (OpKind.REST_AHEAD, "other_rows")}


def missed(engine: Engine, op: Op, run: Run) -> set[str]:
    """Roles that the op's action asks for in vain: when its unit was updated ahead, and when it must be done again."""
    roles = set()
    for ahead in (run.ahead, set()):
        try:
            again = replace(run, ahead=ahead, next_feed=run.feed)
            reach = Reach(op, engine.executor.buffers)
            if op.kind is OpKind.SETTLE_OTHERS:
                numel, width = engine.layout.tiles(op.unit)[op.tile].numel, engine.layout.units[op.unit].row_numel
                reach.cell("other_rows").value = torch.ones(numel // width, dtype=torch.bool)
            engine.executor._actions[op.kind](reach, again, op)
        except KeyError as missing:
            roles |= set(missing.args)
    return roles


def without(plan: Plan, kind: OpKind, role: str) -> tuple[Plan, int]:
    """The plan less one role of its first op of this kind that has it, and which op that is."""
    index = next(i for i, op in enumerate(plan.ops) if op.kind is kind and any(a.role == role for a in op.accesses))
    op = plan.ops[index]
    less = replace(op, accesses=tuple(a for a in op.accesses if a.role != role))
    return replace(plan, ops=(*plan.ops[:index], less, *plan.ops[index + 1 :])), index


@pytest.mark.parametrize("name", SETTINGS)
def test_every_role_that_an_op_does_not_declare_is_out_of_reach(name):
    model, settings = SETTINGS[name]
    decoder, options = toy_decoder(**model), toy_options(**settings)
    with engine_on(decoder, options, CpuDevice()) as engine:
        write_weights(engine.layout, engine)
        result = engine.step(toy_batch(options.micro_batches), lr=LR)
        result.wait()
        engine.evaluate(toy_batch(options.micro_batches))
        for plan in plans_of(decoder.layout, engine.options, decoder.dtype)[:2]:
            for kind, role in dict.fromkeys((op.kind, a.role) for op in plan.ops for a in op.accesses):
                broken, index = without(plan, kind, role)
                with pytest.raises(PlanError):
                    prove(broken, decoder.layout, engine.step_options)
                if (kind, role) not in OPTIONAL | DECLARED_ONLY:
                    assert role in missed(engine, broken.ops[index], result._run), f"{broken.ops[index]} without {role}"


def generation_kinds() -> set[OpKind]:
    """test_generation_failures tries them."""
    layout = tiny_decoder().layout
    return {op.kind for first in (True, False) for op in pass_ops(layout, PassOptions(first=first))}


def test_every_kind_of_op_was_tried():
    tried = set()
    for model, settings in SETTINGS.values():
        decoder, options = toy_decoder(**model), toy_options(**settings)
        plans = plans_of(decoder.layout, options, decoder.dtype)
        tried |= {op.kind for plan in plans for op in plan.ops}
    assert set(OpKind) - tried == generation_kinds() - tried


@pytest.mark.parametrize(
    ("kind", "role"), [(OpKind.FORWARD, "weights"), (OpKind.UPLOAD, "target"), (OpKind.UPDATE, "verdict")]
)
def test_a_run_that_reaches_too_far_fails_by_name(kind, role):
    options = toy_options(**EAGER)
    with engine_on(tiny_decoder(), options) as engine:
        write_weights(engine.layout, engine)
        broken, index = without(engine.plan, kind, role)
        use_plan(engine, broken)
        with pytest.raises(LaneFailure, match=f"KeyError: '{role}'") as caught:
            engine.step(tiny_batch(), lr=LR).wait()
        assert caught.value.label == str(broken.ops[index])


def test_every_plan_is_proven_before_it_runs(monkeypatch):
    """Also those of ragged steps, which are built when they come."""
    proven: list[tuple[bool, int]] = []

    def spy(plan, layout, options) -> None:
        proven.append((plan.trains, options.micro_batches))
        prove(plan, layout, options)

    monkeypatch.setattr("slideformer.engine.engine.prove", spy)
    with engine_on(tiny_decoder(), toy_options(**EAGER, micro_batches=3)) as engine:
        assert isinstance(engine, Engine)
        write_weights(engine.layout, engine)
        for micro_batches in (3, 2, 2, 1):
            engine.step(tiny_batch(micro_batches), lr=LR)
            engine.evaluate(tiny_batch(micro_batches))
    assert set(proven) == {(trains, m) for trains in (True, False) for m in (1, 2, 3)}
    assert len(proven) == len(set(proven))
