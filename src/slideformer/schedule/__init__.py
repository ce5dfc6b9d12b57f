"""What one step does, in which order, and the proof that it may run concurrently. Pure: integers and strings only."""

from slideformer.schedule.ahead import choose_ahead
from slideformer.schedule.check import PlanError, prove
from slideformer.schedule.generation import build_pass, pass_ops
from slideformer.schedule.ops import Access, Buffer, LaneName, Op, OpKind, Place, Plan, Wait
from slideformer.schedule.options import StepOptions, Update
from slideformer.schedule.pass_options import PassOptions
from slideformer.schedule.program import build_evaluation, evaluation_ops
from slideformer.schedule.simulate import Timeline, joined_step_s, simulate, three_digits
from slideformer.schedule.training import build_step, step_ops

__all__ = [
    "Access",
    "Buffer",
    "LaneName",
    "Op",
    "OpKind",
    "PassOptions",
    "Place",
    "Plan",
    "PlanError",
    "StepOptions",
    "Timeline",
    "Update",
    "Wait",
    "build_evaluation",
    "build_pass",
    "build_step",
    "choose_ahead",
    "evaluation_ops",
    "joined_step_s",
    "pass_ops",
    "prove",
    "simulate",
    "three_digits",
    "step_ops",
]
