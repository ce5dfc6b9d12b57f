"""The losses of evaluation sets, per target token over each whole set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slideformer.data import MicroBatch
from slideformer.engine import Engine
from slideformer.train.metrics import evaluation_metrics

Sets = Mapping[str, Sequence[MicroBatch]]


def evaluate(engine: Engine, sets: Sets, *, between: Callable[[], None] = lambda: None) -> dict[str, float]:
    """eval_loss and eval_perplexity of each set, with its name in them if it has one. Changes nothing; blocks.

    between: called after each micro-batch; what it raises ends the evaluation.
    """
    metrics: dict[str, float] = {}
    for name, micro_batches in sets.items():
        loss_sum, num_targets = 0.0, 0
        for micro_batch in micro_batches:
            loss, targets = engine.evaluate([micro_batch])
            loss_sum, num_targets = loss_sum + loss, num_targets + targets
            between()
        metrics |= evaluation_metrics(name, loss_sum, num_targets)
    return metrics
