"""What a config's run would do, without training: its evaluation, or everything that can be known beforehand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from slideformer.config import TrainConfig
from slideformer.errors import BadInput
from slideformer.model.decoder import Decoder
from slideformer.train.console import Console
from slideformer.train.output import claimed
from slideformer.train.plan import RunPlan, plan_run
from slideformer.train.resume import earlier
from slideformer.train.setup import build_decoder
from slideformer.train.trainer import Trainer

NO_TRAINING = {"resume_from_checkpoint": False, "save_strategy": "no", "report_to": (), "load_best_model_at_end": False}


def evaluate_only(config: TrainConfig, console: Console) -> dict[str, float]:
    """eval_loss and eval_perplexity of every evaluation set, with the model's weights as they are in its folder.

    Takes the weights' own bytes on the host, and no optimizer state: all but the smallest parameter count as frozen.
    Raises BadInput and DoesNotFit.
    """
    if not config.eval_dataset and not config.val_size:
        raise BadInput("there is nothing to evaluate: give eval_dataset or val_size")
    bare = config.model_copy(update={**NO_TRAINING, "freeze": ()})
    decoder = build_decoder(bare, "cpu", torch.device("cpu"))
    light = {
        "freeze": (all_but_the_smallest(decoder),),
        "update": "eager",
        "max_grad_norm": 0.0,
        "on_nonfinite": "stop",
    }
    with Trainer(args=bare.model_copy(update=light), console=console) as trainer:
        return trainer.evaluate()


def all_but_the_smallest(decoder: Decoder) -> str:
    """A pattern for `freeze`: a model needs one parameter that is trained, and this leaves the smallest."""
    smallest = min((p for unit in decoder.layout.units for p in unit.params), key=lambda p: p.numel)
    return f"^(?!{re.escape(smallest.name)}$)"


@dataclass(frozen=True, slots=True)
class DryRun:
    """All that is known of a run before it starts."""

    num_steps: int
    steps_per_epoch: int
    reports: tuple[dict[str, object], ...]
    plan: RunPlan

    def as_dict(self) -> dict[str, object]:
        return {
            "num_steps": self.num_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "data": list(self.reports),
            "plan": self.plan.as_dict(),
        }


def dry_run(config: TrainConfig, console: Console) -> DryRun:
    """Read the data, check the model's code and the names and shapes of its weights, and plan. Leaves nothing behind.

    Raises as a run would before its first step: BadInput, and DoesNotFit.
    """
    with claimed(Path(config.output_dir)), Trainer(args=config, console=console) as trainer:
        earlier(config, console)
        prepared = trainer.prepare(console)
        trainer.build()
    plan = plan_run(config)
    plan.require_fit()
    reports = tuple(report.as_dict() for report in prepared.dataset.reports)
    return DryRun(prepared.num_steps, prepared.batches.steps_per_epoch, reports, plan)
