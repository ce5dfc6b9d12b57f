"""slideformer train"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from slideformer.cli.arguments import Debug, Json, Settings, read_config
from slideformer.cli.exits import ended_by_signals, told_in_one_sentence

if TYPE_CHECKING:
    from slideformer.config import TrainConfig

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Read the data, check the model and plan, but do not train or write.")
]


def train(
    context: typer.Context,
    settings: Settings = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fine-tune a model as a config file says.

    The result is a Hugging Face folder in output_dir, with metrics.jsonl and run.json beside it. With --json what is
    told of the run goes to standard error.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json):
        config = read_config(settings, context.args)
        with ended_by_signals(as_json=as_json):
            found = _dry_run(config, as_json=as_json) if dry_run else _train(config, as_json=as_json)
        if as_json:
            print(json.dumps(found, indent=2))


def _train(config: TrainConfig, *, as_json: bool) -> dict[str, object]:
    from slideformer.train.console import PlainConsole, open_console
    from slideformer.train.steady import steady
    from slideformer.train.trainer import Trainer

    stream = steady(sys.stderr if as_json else sys.stdout)
    shown = PlainConsole(stream) if as_json else open_console(stream)
    # Trackers and other packages print as they like; standard output is for the one object.
    with redirect_stdout(stream), shown as console:
        with Trainer(args=config, console=console) as trainer:
            result = trainer.train()
    return {
        "status": "finished",
        "output_dir": config.output_dir,
        "global_step": result.global_step,
        "training_loss": result.training_loss,
        "metrics": dict(result.metrics),
    }


def _dry_run(config: TrainConfig, *, as_json: bool) -> dict[str, object]:
    from slideformer.train.console import PlainConsole
    from slideformer.train.only import dry_run

    with PlainConsole(sys.stderr if as_json else sys.stdout) as console:
        found = dry_run(config, console)
    if not as_json:
        print(
            f"{found.num_steps} steps, {found.steps_per_epoch} an epoch\n\n{found.plan.text()}\n\nnothing was trained"
        )
    return found.as_dict()
