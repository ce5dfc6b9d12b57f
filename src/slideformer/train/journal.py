"""Every line of metrics to everyone who wants it: the file, the trackers, the history and the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slideformer.train.callbacks import Callbacks
from slideformer.train.console import Console
from slideformer.train.metrics import Metrics, MetricsFile
from slideformer.train.samples import Sample
from slideformer.train.trackers import Trackers


@dataclass(slots=True)
class Journal:
    """last: the newest value of every metric."""

    file: MetricsFile
    trackers: Trackers
    callbacks: Callbacks
    console: Console
    last: dict[str, float | int | None] = field(default_factory=dict)

    def step(self, metrics: Metrics, num_steps: int) -> None:
        """A step's line."""
        self._write(metrics)
        self.console.step(metrics, num_steps)

    def evaluation(self, metrics: Metrics) -> None:
        """An evaluation's line."""
        self._write(metrics)
        self.console.evaluation(metrics)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Text that the model has written; its file has it already."""
        for sample in samples:
            for line in sample.lines():
                self.console.note(line)
        texts = {f"samples/{s.number}": f"**{s.completion.prompt.text}**\n\n{s.completion.text}" for s in samples}
        if samples:
            self.trackers.log_texts(texts, samples[0].step)

    def _write(self, metrics: Metrics) -> None:
        self.file.write(metrics)
        self.last |= metrics
        self.trackers.log(metrics)
        self.callbacks.log(metrics)
