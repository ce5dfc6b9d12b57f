"""Callbacks of Hugging Face's Trainer, called by their event names with what they expect to find.

Nothing of transformers is needed: an event is a method's name, and state and control are read and set by attribute.
Steps overlap here: a step is submitted before the result of the one before is read. So `on_step_begin` of a step comes
before `on_step_end` of the one before, and what a callback asks for in `on_step_end` or `on_log` is done after the step
that is then under way. What it asks for in `on_evaluate` or `on_save` is done at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from slideformer.config import TrainConfig
from slideformer.errors import RunFailed
from slideformer.train.metrics import Metrics

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
)
"""Those that are fired. Others of transformers have no moment here: a step is one program, with no optimizer object."""


@dataclass(slots=True)
class State:
    """How far a run is, under the names of transformers' TrainerState. log_history: lines of metrics, with `step`."""

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    num_train_epochs: int = 0
    logging_steps: int = 1
    eval_steps: int | None = None
    save_steps: int | None = None
    train_batch_size: int = 1
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, float | int | None]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, JsonValue] | None = None
    stateful_callbacks: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(slots=True)
class Control:
    """What callbacks ask for, under the names of transformers' TrainerControl."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class Arguments:
    """A TrainConfig with what callbacks of transformers also look for in TrainingArguments."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.logging_dir = str(Path(config.output_dir) / "tensorboard")
        self.world_size, self.process_index, self.local_process_index = 1, 0, 0
        self.disable_tqdm, self.logging_first_step = False, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)

    def to_dict(self) -> dict[str, JsonValue]:
        return self._config.model_dump(mode="json")

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, JsonValue]:
        plain = (bool, int, float, str)
        return {k: v if isinstance(v, plain) else str(v) for k, v in self.to_dict().items()}


class Callbacks:
    """Calls every callback in turn. One without a method for an event is passed over."""

    def __init__(
        self,
        callbacks: Iterable[object],
        config: TrainConfig,
        *,
        model: object = None,
        processing_class: object = None,
    ) -> None:
        """callbacks: objects, or classes to be made without arguments. model: None unless it was given as a module."""
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.arguments = Arguments(config)
        self.state = State(
            logging_steps=config.logging_steps,
            eval_steps=config.eval_steps,
            save_steps=config.save_steps,
            train_batch_size=config.per_device_train_batch_size,
        )
        self.control = Control()
        self._given = {"model": model, "processing_class": processing_class}
        self._nothing = {"optimizer": None, "lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None}

    def fire(self, event: str, **values: object) -> None:
        """Call `event` of every callback. What one raises ends the run as it is.

        Raises RunFailed when one asks for what there is not: to leave an epoch early.
        """
        assert event in EVENTS
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                returned = method(self.arguments, self.state, self.control, **self._given, **self._nothing, **values)
                if returned is not None:
                    self.control = returned
        if self.control.should_epoch_stop:
            raise RunFailed(
                "a callback has set should_epoch_stop, and a run here cannot leave an epoch early: set "
                "should_training_stop, or give fewer rows"
            )

    def log(self, metrics: Metrics) -> None:
        """Add a line to the history and tell of it."""
        line = {**metrics, "step": metrics["global_step"]}
        self.state.log_history.append(line)
        self.fire("on_log", logs=dict(line))

    def take(self, name: str) -> bool:
        """Whether should_NAME was set; it no longer is."""
        asked = bool(getattr(self.control, f"should_{name}"))
        setattr(self.control, f"should_{name}", False)
        return asked

    def kept(self) -> dict[str, JsonValue]:
        """What callbacks that keep a state want to find again (transformers' ExportableState): class name -> it."""
        found: dict[str, JsonValue] = {}
        for callback in self._callbacks:
            state = getattr(callback, "state", None)
            if callable(state):
                found[type(callback).__name__] = state()["attributes"]
        return found

    def restore(self, kept: Mapping[str, JsonValue]) -> None:
        """Give it back to those of the same class names."""
        for callback in self._callbacks:
            attributes = kept.get(type(callback).__name__)
            for name, value in (attributes if isinstance(attributes, dict) else {}).items():
                setattr(callback, name, value)
