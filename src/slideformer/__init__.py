"""Full-parameter fine-tuning of language models through a sliding window of layers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slideformer.config import TrainConfig
    from slideformer.engine import Engine
    from slideformer.train.trainer import Trainer

__all__ = ["Engine", "TrainConfig", "Trainer"]
__version__ = "0.1.0"

_WHERE = {
    "Engine": "slideformer.engine",
    "TrainConfig": "slideformer.config",
    "Trainer": "slideformer.train.trainer",
}


def __getattr__(name: str) -> object:
    """Public names are imported when they are asked for: the command line must not wait for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
