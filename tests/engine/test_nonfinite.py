"""A loss or a gradient that is not finite: skipped or stopped before any weight changes, or the state is torn."""

from __future__ import annotations

import math

import pytest
import torch

from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    HookedDevice,
    engine_on,
    run_sequential,
    state_hashes,
    tiny_batch,
    tiny_decoder,
    toy_options,
    write_weights,
)
from slideformer.device import LaneFailure
from slideformer.engine import Engine, EngineOptions, NonFinite
from slideformer.errors import BadInput, RunFailed
from slideformer.schedule import OpKind

SKIP = {**DEFERRED, "on_nonfinite": "skip"}
BAD = 2  # the third step
STEPS = [(tiny_batch(2, seed=s), LR) for s in range(5)]
UNITS = ["rows of the table", "block.0", "block.1", "final", "output"]
REDUCES = (OpKind.REDUCE, OpKind.REDUCE_OUTPUT, OpKind.REDUCE_ROWS)


class Injector(HookedDevice):
    """Puts a value into the gradient of one unit, or into the loss, in one step, before anybody has looked at it."""

    def __init__(self, target: str, value: float, step: int = BAD) -> None:
        super().__init__(before=self._before, poison=True)
        self.target, self.value, self.step = target, value, step
        self.engine: Engine | None = None

    def _before(self, number: int) -> None:
        assert self.engine is not None
        ops = self.engine.plan.ops
        op = ops[number % len(ops)]
        if number // len(ops) != self.step or self._name(op) != self.target:
            return
        role = "sum" if any(a.role == "sum" for a in op.accesses) else "grad" if op.kind in REDUCES else "source"
        buffer = next(a.buffer for a in op.accesses if a.role == role)
        self.engine.executor.buffers[buffer][0] = self.value

    def _name(self, op) -> str:
        if op.kind is OpKind.REPORT_LOSS:
            return "loss"
        if op.kind not in REDUCES:
            return ""
        return "rows of the table" if op.kind is OpKind.REDUCE_ROWS else self.engine.layout.units[op.unit].name


def decoder(dtype=torch.float32, tied=False):
    return tiny_decoder(blocks=2, dtype=dtype, tied=tied)


def engine_with(injector: Injector, options: EngineOptions, dtype=torch.float32, tied=False):
    return engine_on(decoder(dtype, tied), options, injector)


def start(engine: Engine, injector: Injector) -> None:
    injector.engine = engine
    write_weights(engine.layout, engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("target", "value"), [*((t, math.nan) for t in ("loss", *UNITS)), ("loss", -math.inf), ("block.0", math.inf)]
)
def test_skip_leaves_every_weight_and_moment_as_it_was(target, value, dtype):
    """The steps after it go on as if it had not been there: the count of updates too."""
    options, injector = toy_options(**SKIP, micro_batches=2), Injector(target, value)
    with engine_with(injector, options, dtype) as engine:
        start(engine, injector)
        results = [engine.step(batch, lr=lr) for batch, lr in STEPS]
        assert [r.nonfinite for r in results] == [i == BAD for i in range(5)]
        assert math.isfinite(results[BAD].loss) == (target != "loss")
        assert math.isfinite(results[BAD].grad_norm) == (target == "loss")
        assert engine.num_updates == 4
        found = state_hashes(engine)
    expected = run_sequential(decoder(dtype), options, STEPS[:BAD] + STEPS[BAD + 1 :])
    assert found == expected.state
    assert [r.loss for i, r in enumerate(results) if i != BAD] == list(expected.losses)


@pytest.mark.parametrize("ahead", [(), (0, 1)], ids=str)
@pytest.mark.parametrize("target", ["rows of the table", "table"])
def test_skip_in_a_tied_model_leaves_the_table_as_it_was(target, ahead):
    options = toy_options(**SKIP, micro_batches=2, ahead=ahead)
    injector = Injector(target, math.nan)
    with engine_with(injector, options, tied=True) as engine:
        start(engine, injector)
        results = [engine.step(batch, lr=lr) for batch, lr in STEPS]
        assert [r.nonfinite for r in results] == [i == BAD for i in range(5)]
        engine.synchronize()
        found = state_hashes(engine)
    assert found == run_sequential(decoder(tied=True), options, STEPS[:BAD] + STEPS[BAD + 1 :]).state


@pytest.mark.parametrize("ahead", [(), (0, 1, 2, 3, 4)], ids=["", "ahead"])
@pytest.mark.parametrize("target", ["loss", *UNITS])
def test_a_deferred_stop_comes_before_any_weight_is_written(target, ahead):
    program = {"update": "deferred", "max_grad_norm": 100.0, "ahead": ahead}
    options, injector = toy_options(**program, micro_batches=2), Injector(target, math.nan)
    with engine_with(injector, options) as engine:
        start(engine, injector)
        results = [engine.step(batch, lr=lr) for batch, lr in STEPS[: BAD + 1]]
        with pytest.raises(LaneFailure, match="no weight was changed in this step") as caught:
            results[BAD].wait()
        assert isinstance(caught.value.__cause__, NonFinite)
        with pytest.raises(LaneFailure):
            engine.step(*STEPS[0][:1], lr=LR)
        expected = run_sequential(decoder(), options, STEPS[:BAD])
        assert state_hashes(engine) == expected.state
        assert torch.isfinite(engine.read(1, 0, 10)).all()


def test_an_eager_stop_on_the_loss_comes_before_any_weight_is_written():
    options, injector = toy_options(**EAGER, micro_batches=2), Injector("loss", math.inf)
    with engine_with(injector, options) as engine:
        start(engine, injector)
        results = [engine.step(batch, lr=lr) for batch, lr in STEPS[: BAD + 1]]
        with pytest.raises(LaneFailure, match="the loss is inf; no weight was changed in this step"):
            _ = results[BAD].loss
        assert state_hashes(engine) == run_sequential(decoder(), options, STEPS[:BAD]).state
        engine.read(1, 0, 10)


@pytest.mark.parametrize("target", UNITS)
def test_an_eager_stop_on_a_gradient_tears_the_state_unless_nothing_was_written_yet(target):
    options, injector = toy_options(**EAGER, micro_batches=2), Injector(target, math.nan)
    with engine_with(injector, options) as engine:
        start(engine, injector)
        writers = (OpKind.UPDATE, OpKind.UPDATE_TABLE, OpKind.UPDATE_REST, OpKind.UPDATE_ROWS)
        first = next(op.unit for op in engine.plan.ops if op.kind in writers)
        results = [engine.step(batch, lr=lr) for batch, lr in STEPS[: BAD + 1]]
        with pytest.raises(LaneFailure, match="a gradient is not finite"):
            results[BAD].wait()
        before = run_sequential(decoder(), options, STEPS[:BAD]).state
        found = state_hashes(engine)
        if engine.layout.units[first].name == target:
            assert found == before
            engine.read(1, 0, 10)
        else:
            assert found != before
            for _ in range(2):
                with pytest.raises(RunFailed, match="torn.*start again from the last checkpoint"):
                    engine.read(1, 0, 10)
        own = [f"{target} {part}" for part in ("weight", "residual", "exp_avg", "exp_avg_sq")]
        assert [found.get(n) for n in own] == [before.get(n) for n in own], "what was not finite was not written"


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.bfloat16), (math.inf, torch.float32), (3e38, torch.float32)], ids=str
)
def test_a_weight_that_is_not_finite_is_skipped_too(value, dtype):
    """Not injected into a gradient: the model itself overflows."""
    options = toy_options(**SKIP)
    with engine_on(decoder(dtype), options) as engine:
        write_weights(engine.layout, engine)
        engine.write(2, 5, torch.tensor([value]))
        before = state_hashes(engine)
        results = [engine.step(batch[:1], lr=lr) for batch, lr in STEPS[:3]]
        assert all(r.nonfinite for r in results)
        engine.synchronize()
        assert state_hashes(engine) == before
        assert engine.num_updates == 0


def test_what_cannot_be_skipped_or_clipped_is_refused():
    with pytest.raises(BadInput, match="on_nonfinite is skip with update: eager"):
        toy_options(**EAGER, on_nonfinite="skip")
    with pytest.raises(BadInput, match="max_grad_norm is 1.0 with update: eager"):
        toy_options(update="eager", max_grad_norm=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(window=0), dict(grad_slots=0), dict(ring=0), dict(micro_batches=0), dict(micro_batch_size=0),
        dict(max_length=0), dict(hidden_ring=1), dict(saved_on_device=-1), dict(max_grad_norm=-1.0),
        dict(max_grad_norm=math.nan), dict(max_grad_norm=math.inf), dict(beta1=1.0), dict(beta2=-0.1), dict(eps=-1.0),
        dict(weight_decay=-0.1),
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(BadInput, match=next(iter(wrong))):
        toy_options(**wrong)
