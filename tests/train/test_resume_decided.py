"""What an engine decides by its room and its measurements, and the last bits depend on, stays as it was for a run that
goes on: bit for bit the unbroken run, also where it would be decided otherwise now."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from slideformer.config import TrainConfig
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Decided
from slideformer.engine.settle import budgets_of, settle
from slideformer.native import load
from slideformer.train import trainer
from slideformer.train.console import PlainConsole
from slideformer.train.setup import build_decoder, engine_options
from slideformer.train.trainer import Trainer
from train.test_micro_batch import room_for
from train.test_resume import Killed, kill_after, metrics_of, run, state_of  # noqa: F401  a fixture among them
from train.toy import make_model

STEPS = {"max_steps": 4, "save_steps": 2, "save_total_limit": None, "learning_rate": 1e-2}
ON_A_CARD = {**STEPS, "per_device_train_batch_size": 1, "tile_numel": 1024, "bf16": False, "window": 1, "grad_slots": 1}
SLICES, WHOLE = "the output projection in slices", "the output projection whole"


class Card(CpuDevice):
    """Memory of its own, of which max_gpu_memory says how much there is."""

    kind, model = "cuda", "a card with 1 multiprocessors"

    def free_nbytes(self) -> int:
        return 1 << 40


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch) -> None:
    monkeypatch.setattr(trainer, "check_parity", lambda *args, **settings: None)
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    monkeypatch.setattr("slideformer.engine.probe.UPDATE_NUMEL", 1 << 16)


@pytest.fixture
def card_config(config_for, tmp_path, monkeypatch) -> Callable[..., TrainConfig]:
    """A config whose run finds a Card."""
    monkeypatch.setattr(trainer, "open_device", lambda kind: Card())
    return partial(config_for, model=make_model(tmp_path / "model", num_hidden_layers=2), **ON_A_CARD)


def for_a_whole_head(config: TrainConfig, *, lacks_nbytes: int = 0) -> dict[str, str]:
    """max_gpu_memory with which the run fits, its head whole; or with which it does not quite."""
    decoder, kernels = build_decoder(config, Card.kind, torch.device("cpu")), load(1)
    options = replace(engine_options(config), sliced_head=False, resident=(), keep=(), saved_on_device=0, late=())
    try:
        with Card() as device:
            costs = settle(options, decoder, device, kernels).costs
    finally:
        kernels.close()
    nbytes = budgets_of(decoder, costs).of(options).device_nbytes - lacks_nbytes
    return {"max_gpu_memory": f"{nbytes / 2**10}KiB"}


@pytest.fixture
def broken(kill_after):  # noqa: F811
    """Run a config until it is killed in its third step, which leaves checkpoint-2."""

    def until_killed(config: TrainConfig) -> None:
        kill_after(3)
        with pytest.raises(Killed):
            run(config)
        kill_after(-1)

    return until_killed


@pytest.mark.parametrize("goes_on_on", ["roomy", "tight"])
def test_a_run_goes_on_with_the_head_it_had(card_config, tmp_path, broken, goes_on_on) -> None:
    """tight: as much as a whole head needs, and less than one is chosen in."""
    cards = {"roomy": {}, "tight": for_a_whole_head(card_config())}
    began_on = cards["tight" if goes_on_on == "roomy" else "roomy"]
    straight = card_config(output_dir=str(tmp_path / "straight"), **began_on)
    other = card_config(output_dir=str(tmp_path / "other"), **cards[goes_on_on])
    chosen, chosen_there = (SLICES, WHOLE) if goes_on_on == "roomy" else (WHOLE, SLICES)
    assert chosen in run(straight) and chosen_there in run(other)
    assert state_of(straight, 4) != state_of(other, 4), "it is to be seen in the last bits"
    broken(card_config(**began_on))
    again = card_config(**cards[goes_on_on], resume_from_checkpoint="auto")
    told = run(again)
    assert chosen in told and "last bits" not in told
    assert state_of(again, 4) == state_of(straight, 4)
    assert metrics_of(again) == metrics_of(straight)


def test_a_head_that_has_no_room_as_it_was_is_chosen_anew_with_one_warning(card_config, broken) -> None:
    broken(card_config())
    tight = for_a_whole_head(card_config(), lacks_nbytes=1)
    told = run(card_config(**tight, resume_from_checkpoint="auto"))
    expected = (
        "warning: what checkpoint-2 was made with has no room here, so the last bits may differ from an unbroken "
        "run's: output projection was whole and is now in slices (tile_numel 1024)\n"
    )
    assert expected in told and told.count("warning") == 1


def test_state_that_is_to_be_on_the_device_takes_the_head_with_it(card_config, broken) -> None:
    """placement: resident is said, slices are not."""
    broken(card_config(**for_a_whole_head(card_config())))
    told = run(card_config(placement="resident", resume_from_checkpoint="auto"))
    expected = "output projection was in slices (tile_numel 1024) and is now whole\n"
    assert f"warning: the last bits may differ from an unbroken run's: {expected}" in told


def test_an_evaluation_before_does_not_decide_for_a_run_that_goes_on(card_config, tmp_path, broken) -> None:
    fields = {"val_size": 2, "eval_steps": 4}
    tight = for_a_whole_head(card_config(**fields))
    straight = card_config(output_dir=str(tmp_path / "straight"), **fields, **tight)
    run(straight)
    broken(card_config(**fields, **tight))
    again = card_config(**fields, resume_from_checkpoint="auto")
    with Trainer(args=again, console=PlainConsole(io.StringIO())) as looking:
        looking.evaluate()
        assert looking._engine.decided == Decided(False, 1)
        looking.train()
    assert state_of(again, 4) == state_of(straight, 4)


def test_a_run_goes_on_with_as_many_rows_at_a_time_as_it_had(config_for, tmp_path, broken) -> None:
    """Those of an evaluation too, whose losses are metrics."""
    fields = {**STEPS, "per_device_train_batch_size": 8, "auto_find_batch_size": True, "offload_activations": "cpu"}
    config = partial(config_for, **fields, val_size=8, eval_steps=2, window=2)
    tight = {"max_host_memory": room_for(config(), 1)}
    straight = config(output_dir=str(tmp_path / "straight"), **tight)
    roomy = config(output_dir=str(tmp_path / "roomy"))
    assert "tokens, 1 at a time" in run(straight) and "tokens, 1" not in run(roomy)
    assert state_of(straight, 4) != state_of(roomy, 4), "it is to be seen in the last bits"
    broken(config(**tight))
    again = config(resume_from_checkpoint="auto")
    told = run(again)
    assert "tokens, 1 at a time" in told and "last bits" not in told
    assert state_of(again, 4) == state_of(straight, 4)
    assert metrics_of(again) == metrics_of(straight)
