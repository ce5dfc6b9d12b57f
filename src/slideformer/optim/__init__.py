"""The optimizer on one tile of state: its numbers, and its definition in torch."""

from slideformer.optim.adamw import Hyper, Scalars, join, reference_update, reference_update_rows, split

__all__ = ["Hyper", "Scalars", "join", "reference_update", "reference_update_rows", "split"]
