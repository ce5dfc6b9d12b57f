"""Which evaluation was the best so far, and whether it is worth going on: a function of the evaluations alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slideformer.config import FOLLOWS_A_METRIC, TrainConfig
from slideformer.errors import BadInput

Judged = tuple[int, float]  # step, metric


@dataclass(frozen=True, slots=True)
class Rule:
    """What makes an evaluation better. metric: a name in metrics.jsonl."""

    metric: str
    greater: bool = False
    patience: int | None = None
    threshold: float = 0.0

    def better(self, value: float, than: float) -> bool:
        return value > than if self.greater else value < than


def rule_of(config: TrainConfig, names: Collection[str]) -> Rule:
    """The config's rule. names: of the evaluation sets.

    Raises BadInput when something depends on a metric that no evaluation gives.
    """
    metric = config.metric_for_best_model or "eval_loss"
    given = [f"eval_{name}_{kind}" if name else f"eval_{kind}" for name in names for kind in ("loss", "perplexity")]
    needed = (
        config.load_best_model_at_end
        or config.early_stopping_patience is not None
        or config.lr_scheduler_type in FOLLOWS_A_METRIC
    )
    if needed and metric not in given:
        raise BadInput(f"metric_for_best_model is {metric}, which no evaluation gives: choose from {', '.join(given)}")
    return Rule(metric, config.greater_is_better, config.early_stopping_patience, config.early_stopping_threshold)


class Judge:
    """Evaluations in the order in which they were made."""

    def __init__(self, rule: Rule, judged: Sequence[Judged] = (), best_saved: int | None = None) -> None:
        """judged, best_saved: of the run so far, when it goes on."""
        self.rule, self.judged = rule, list(judged)
        self.best_saved = best_saved

    def add(self, step: int, metrics: Mapping[str, float | int | None]) -> float | None:
        """Take note of an evaluation. Returns the metric, or None when it is not there or not a number."""
        value = metrics.get(self.rule.metric)
        if value is None or value != value:
            return None
        self.judged.append((step, float(value)))
        return float(value)

    def saved(self, step: int) -> None:
        """There is a checkpoint of this step now."""
        value, best = self._of(step), self._of(self.best_saved)
        if value is not None and (best is None or self.rule.better(value, best)):
            self.best_saved = step

    def _of(self, step: int | None) -> float | None:
        return next((value for at, value in reversed(self.judged) if at == step), None)

    @property
    def best(self) -> Judged | None:
        """The best of all; of equals the first."""
        found: Judged | None = None
        for judged in self.judged:
            if found is None or self.rule.better(judged[1], found[1]):
                found = judged
        return found

    @property
    def exhausted(self) -> bool:
        """The last `patience` evaluations were none of them better by more than the threshold."""
        if self.rule.patience is None:
            return False
        best, waited = None, 0
        for _, value in self.judged:
            better = best is None or (self.rule.better(value, best) and abs(value - best) > self.rule.threshold)
            waited = 0 if better else waited + 1
            if best is None or self.rule.better(value, best):
                best = value
        return waited >= self.rule.patience
