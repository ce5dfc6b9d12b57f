"""Runs proven plans: one training step, one evaluation."""

from slideformer.engine.engine import Engine
from slideformer.engine.fit import budget_of, require_fit
from slideformer.engine.options import Decided, EngineOptions, Offload
from slideformer.engine.run import NonFinite, StepResult

__all__ = ["Decided", "Engine", "EngineOptions", "NonFinite", "Offload", "StepResult", "budget_of", "require_fit"]
