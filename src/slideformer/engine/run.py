"""One run of a plan: what its ops share besides buffers, and what its caller learns."""

from __future__ import annotations

from dataclasses import dataclass, field

from slideformer.device import Mark
from slideformer.engine.feed import Feed
from slideformer.errors import RunFailed
from slideformer.optim import Hyper
from slideformer.schedule import OpKind, Plan, Timeline
from slideformer.schedule.simulate import Span

CANNOT_BE_TAKEN_BACK = (
    "a gradient is not finite, and an eager update cannot be taken back: what was already updated in this step stays; "
    "use update: deferred to stop before any write"
)


class NonFinite(RunFailed):
    """A loss or a gradient is infinite or not a number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether this run's updates happen, and with which numbers. decay and plain: for parameters that do and do not
    decay."""

    apply: bool
    decay: Hyper
    plain: Hyper


@dataclass(slots=True)
class Run:
    """Written by the actions of the run, in the lanes that the plan orders."""

    feed: Feed
    lr: float
    trains: bool
    loss: float = 0.0
    grad_norm: float = 0.0
    nonfinite: bool = False
    writes_started: bool = False
    next_feed: Feed | None = None  # of the run that follows, as soon as that is submitted
    squares: float = 0.0  # of the norms of units updated ahead, as far as they are known
    ahead: set[tuple[int, int]] = field(default_factory=set)  # (unit, tile) whose spare copy holds the new state
    marks: list[Mark] = field(default_factory=list)
    dropped: bool = False  # nobody wants it any more: what has not begun does nothing


class StepResult:
    """What one step or evaluation gave. Returned before the work is done: the properties wait for what they need."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan, self._run = plan, run
        self._settled = {op.kind: i for i, op in enumerate(plan.ops)}

    def _wait(self, *kinds: OpKind) -> None:
        for kind in kinds:
            if kind in self._settled:
                self._run.marks[self._settled[kind]].wait()

    @property
    def loss(self) -> float:
        """Mean cross entropy per target token of the whole batch."""
        self._wait(OpKind.GUARD, OpKind.DECIDE, OpKind.RESULT)
        return self._run.loss

    @property
    def grad_norm(self) -> float:
        """L2 norm of the whole gradient, before clipping."""
        self._wait(OpKind.TOTAL, OpKind.DECIDE)
        return self._run.grad_norm

    @property
    def nonfinite(self) -> bool:
        """The step was skipped because its loss or its gradient was not finite."""
        self._wait(OpKind.GUARD, OpKind.DECIDE, OpKind.RESULT)
        return self._run.nonfinite

    @property
    def num_target_tokens(self) -> int:
        return self._run.feed.num_target_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens without padding, where the batch came with a mask; else all."""
        return self._run.feed.num_tokens

    def wait(self) -> None:
        """Block until every op of the run is done."""
        for mark in self._run.marks:
            mark.wait()

    def timeline(self) -> Timeline:
        """What was measured, op by op. Waits for the run."""
        self.wait()
        spans = [Span(op, 0, *mark.span_s()) for op, mark in zip(self._plan.ops, self._run.marks, strict=True)]
        return Timeline(tuple(spans))

    def busy_s(self) -> dict[str, float]:
        """Seconds each lane worked, by name (`Timeline.worked_s`). Waits for the run."""
        return self.timeline().worked_s()
