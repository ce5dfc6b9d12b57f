"""`full_determinism`: torch's kernels that give the same bits twice, for as long as a run lasts."""

from __future__ import annotations

import io
import os

import pytest
import torch
from transformers import TrainerCallback

from slideformer.errors import BadInput
from slideformer.train.console import PlainConsole
from slideformer.train.setup import CUBLAS_WORKSPACES
from slideformer.train.trainer import Trainer


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(CUBLAS_WORKSPACES, "")  # what a run sets is gone after the test
    monkeypatch.delenv(CUBLAS_WORKSPACES)


class Asking(TrainerCallback):
    """Keeps what holds in the middle of a run."""

    def on_step_end(self, args, state, control, **given) -> None:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        self.found = torch.are_deterministic_algorithms_enabled(), fills, os.environ.get(CUBLAS_WORKSPACES)


def found_during(config) -> tuple[bool, bool, str | None]:
    asking = Asking()
    with Trainer(args=config, callbacks=[asking], console=PlainConsole(io.StringIO())) as trainer:
        trainer.train()
    return asking.found


def test_it_holds_from_the_model_to_the_end_of_the_run(config_for) -> None:
    assert found_during(config_for(max_steps=1)) == (False, True, None)
    assert found_during(config_for(max_steps=1, full_determinism=True)) == (True, False, ":4096:8")
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def test_a_workspace_that_the_user_chose_stays(config_for, monkeypatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACES, ":16:8")
    assert found_during(config_for(max_steps=1, full_determinism=True))[2] == ":16:8"
    monkeypatch.setenv(CUBLAS_WORKSPACES, ":0:0")
    with pytest.raises(BadInput, match=r"is ':0:0' in the environment, must be :4096:8 or :16:8 for full_determinism"):
        found_during(config_for(max_steps=1, full_determinism=True))
    assert found_during(config_for(max_steps=1))[2] == ":0:0", "asked for by nobody"
