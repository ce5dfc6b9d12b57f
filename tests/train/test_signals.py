"""Signals end a run with a checkpoint from which it goes on bit for bit; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from engine.toys import HookedDevice
from slideformer.model import files
from slideformer.train import trainer
from slideformer.train.saver import Saver
from slideformer.train.stop import Stopped, StopRequests
from train.test_resume import _no_parity_check, kill_after, metrics_of, run, state_of  # noqa: F401  fixtures among them


def test_a_signal_in_a_step_leaves_one_complete_checkpoint_of_it(config_for, tmp_path, kill_after) -> None:  # noqa: F811
    fields = {"max_steps": 9, "save_steps": 100, "warmup_steps": 5}
    straight = config_for(output_dir=str(tmp_path / "straight"), **fields)
    run(straight)
    kill_after(2, signal.SIGTERM)
    expected = "after step 3 of 9: go on from checkpoint-3 with resume_from_checkpoint: auto"
    with pytest.raises(Stopped, match=expected) as caught:
        run(config_for(**fields))
    assert caught.value.signum == signal.SIGTERM
    assert [path.name for path in tmp_path.glob("out/*checkpoint*")] == ["checkpoint-3"]
    kill_after(-1)
    again = config_for(**fields, resume_from_checkpoint="auto")
    run(again)
    assert state_of(again, 9) == state_of(straight, 9)
    assert metrics_of(again) == metrics_of(straight)


def test_a_signal_in_an_evaluation_leaves_a_checkpoint_and_the_evaluation_is_made_anew(
    config_for, tmp_path, monkeypatch
) -> None:
    fields = {"max_steps": 4, "save_steps": 4, "val_size": 4, "eval_strategy": "steps", "eval_steps": 2}
    fields |= {"per_device_eval_batch_size": 1}
    straight = config_for(output_dir=str(tmp_path / "straight"), **fields)
    run(straight)
    evaluate = trainer.Engine.evaluate
    with monkeypatch.context() as patched:

        def interrupted(self, batch):
            os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(self, batch)

        patched.setattr(trainer.Engine, "evaluate", interrupted)
        with pytest.raises(Stopped, match="in the evaluation after step 2: go on from checkpoint-2"):
            run(config_for(**fields))
    again = config_for(**fields, resume_from_checkpoint="auto")
    run(again)
    assert metrics_of(again) == metrics_of(straight)
    assert state_of(again, 4) == state_of(straight, 4)


def test_a_signal_in_a_save_lets_it_finish_and_writes_no_second_one(config_for, tmp_path, monkeypatch) -> None:
    save = Saver.save

    def interrupted(self, progress):
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, progress)

    monkeypatch.setattr(Saver, "save", interrupted)
    with pytest.raises(Stopped, match="after step 2 of 5: go on from checkpoint-2"):
        run(config_for(max_steps=5, save_steps=2))
    assert [path.name for path in tmp_path.glob("out/*checkpoint*")] == ["checkpoint-2"]


def test_a_signal_just_after_the_look_for_one_is_not_answered_without_a_checkpoint(config_for, monkeypatch) -> None:
    evaluates_after, sent = trainer.Loop._evaluates_after, []

    def signalled(self, index):
        if index == 1 and not sent:
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append(index)
        return evaluates_after(self, index)

    monkeypatch.setattr(trainer.Loop, "_evaluates_after", signalled)
    with pytest.raises(Stopped, match="after step 3 of 9: go on from checkpoint-3"):
        run(config_for(max_steps=9, save_steps=100))


def test_a_second_signal_in_a_save_ends_the_run_at_once_and_leaves_no_half(config_for, tmp_path, monkeypatch) -> None:
    sent: list[str] = []

    class Impatient(files.Summing):
        def write(self, data):
            super().write(data)
            if "checkpoint-4" in self._file.name and not sent:
                sent.append(self._file.name)  # twice in all: the lane may be at its piece a little longer than the run
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.2)  # this is another thread: two at once would be seen as one

    monkeypatch.setattr(files, "Summing", Impatient)
    before = threading.enumerate()
    with pytest.raises(Stopped, match="at once, because it was the second signal"):
        run(config_for(max_steps=5, save_steps=2))
    assert [path.name for path in tmp_path.glob("out/*checkpoint*")] == ["checkpoint-2"]
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


def test_a_second_signal_waits_for_no_queued_work(config_for, kill_after, monkeypatch) -> None:  # noqa: F811
    """Two steps are queued when it comes; they would take seconds."""
    after: list[float] = []

    def slow(number: int) -> None:
        if after:
            time.sleep(0.1)

    def impatient(self, step):
        after.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trainer, "open_device", lambda kind: HookedDevice(before=slow))
    monkeypatch.setattr(trainer.Loop, "_finish", impatient)
    with pytest.raises(Stopped, match="at once, because it was the second signal"):
        run(config_for(max_steps=9, save_steps=2))
    assert time.monotonic() - after[0] < 1


@pytest.mark.parametrize("ignored", [True, False], ids=["nohup", "terminal"])
def test_a_terminal_that_goes_away_asks_for_the_end_unless_nohup_said_no(ignored) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.asked is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigusr1_saves_and_goes_on(config_for, tmp_path, kill_after) -> None:  # noqa: F811
    kill_after(2, signal.SIGUSR1)
    told = run(config_for(max_steps=6, save_steps=100))
    assert [path.name for path in sorted(tmp_path.glob("out/*checkpoint*"))] == ["checkpoint-3", "checkpoint-6"]
    assert "checkpoint-3: " in told and "GB/s" in told


def test_sigusr1_without_checkpoints_is_told_and_ignored(config_for, kill_after) -> None:  # noqa: F811
    kill_after(2, signal.SIGUSR1)
    assert "warning: SIGUSR1 asks for a checkpoint, but save_strategy is no" in run(config_for(max_steps=4))
