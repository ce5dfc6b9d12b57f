"""Callbacks written for transformers' Trainer, in a run here."""

from __future__ import annotations

import io

import pytest
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback

from slideformer.errors import RunFailed
from slideformer.train.callbacks import EVENTS, Callbacks
from slideformer.train.console import PlainConsole
from slideformer.train.trainer import Trainer
from train.test_trainer import read_metrics


def run(config, *callbacks, **fields) -> Trainer:
    with Trainer(args=config, callbacks=callbacks, console=PlainConsole(io.StringIO()), **fields) as trainer:
        trainer.train()
    return trainer


class Noting(TrainerCallback):
    """Keeps (event, global_step) of all that is fired."""

    def __init__(self) -> None:
        self.heard = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **given: self.heard.append((name, state.global_step))
        return super().__getattribute__(name)


def test_every_event_comes_in_its_place(config_for) -> None:
    noting = Noting()
    run(config_for(max_steps=3, val_size=4, eval_steps=3, save_steps=3), noting)
    assert {name for name, _ in noting.heard} == set(EVENTS) - {"on_epoch_end"}  # three of five steps of the epoch
    steps = [number for name, number in noting.heard if name == "on_step_end"]
    assert steps == [1, 2, 3]
    names = [name for name, _ in noting.heard]
    assert names[:4] == ["on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin"]
    # The second step is under way before the first one's result is read.
    assert names.index("on_step_end") > [i for i, name in enumerate(names) if name == "on_step_begin"][1]
    end = ["on_step_end", "on_log", "on_log", "on_evaluate", "on_save", "on_train_end"]
    assert names[-6:] == end
    assert all(hasattr(TrainerCallback, name) for name in EVENTS)


def test_epochs_have_events(config_for) -> None:
    noting = Noting()
    run(config_for(num_train_epochs=2, per_device_train_batch_size=12), noting)
    assert [n for n in noting.heard if n[0] == "on_epoch_end"] == [("on_epoch_end", 2), ("on_epoch_end", 4)]
    assert len([n for n in noting.heard if n[0] == "on_epoch_begin"]) == 2


class AskingAt(TrainerCallback):
    """Asks for something once, at the end of a step."""

    def __init__(self, step: int, *wanted: str) -> None:
        self.step, self.wanted = step, wanted

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self.step:
            for name in self.wanted:
                setattr(control, f"should_{name}", True)
        return control


def test_what_a_callback_asks_for_is_done_after_the_step_under_way(config_for, tmp_path) -> None:
    config = config_for(
        max_steps=9,
        val_size=4,
        eval_strategy="steps",
        eval_steps=9,
        save_steps=9,
        logging_steps=100,
        save_total_limit=None,
    )
    run(config, AskingAt(2, "evaluate", "save", "log"), AskingAt(4, "training_stop"))
    metrics = read_metrics(config)
    # Step 2 is logged itself, its number being known; step 3 was under way; 5 is the last, and so has all three.
    assert [m["global_step"] for m in metrics if "loss" in m] == [2]
    assert [m["global_step"] for m in metrics if "eval_loss" in m] == [3, 5]
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-5"]


def test_asking_to_leave_an_epoch_is_refused_with_the_way_out(config_for) -> None:
    with pytest.raises(RunFailed, match="should_epoch_stop.*: set should_training_stop"):
        run(config_for(max_steps=3), AskingAt(1, "epoch_stop"))


def test_transformers_own_callbacks_work(config_for, capsys, tmp_path) -> None:
    config = config_for(
        max_steps=8, val_size=4, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        learning_rate=0.0, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = run(config, EarlyStoppingCallback(early_stopping_patience=2), PrinterCallback, TensorBoardCallback())
    # With a rate of 0 nothing gets better after the first evaluation; the third one is the second in vain.
    assert trainer.state.global_step == 3
    assert trainer.state.best_global_step == 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out/checkpoint-1")
    assert "'eval_loss'" in capsys.readouterr().out
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))


def test_a_callback_that_keeps_a_state_finds_it_again(config_for) -> None:
    early = EarlyStoppingCallback(early_stopping_patience=5)
    early.early_stopping_patience_counter = 3
    kept = Callbacks([early], config_for()).kept()
    again = EarlyStoppingCallback(early_stopping_patience=5)
    Callbacks([again], config_for()).restore(kept)
    assert again.early_stopping_patience_counter == 3


def test_a_callback_of_any_class_is_called_by_its_methods_names_alone(config_for) -> None:
    class Own:
        logs: list[dict] = []

        def on_log(self, args, state, control, logs, **given) -> None:
            self.logs.append(logs)

    trainer = run(config_for(max_steps=2), Own())
    assert Own.logs == trainer.state.log_history
    assert [line["step"] for line in Own.logs] == [1, 2]


def test_what_a_callback_raises_ends_the_run_as_it_is(config_for) -> None:
    class Broken:
        def on_step_end(self, *given, **named) -> None:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(config_for(max_steps=3), Broken())
