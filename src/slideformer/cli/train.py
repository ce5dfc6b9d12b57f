"""slideformer train"""

from __future__ import annotations

import sys

import typer

from slideformer.cli.arguments import Debug, Settings, read_config
from slideformer.cli.exits import say, told_in_one_sentence


def train(context: typer.Context, settings: Settings = None, debug: Debug = False) -> None:
    """Fine-tune a model as a config file says.

    The result is a Hugging Face folder in output_dir, with metrics.jsonl and run.json beside it.
    """
    with told_in_one_sentence(debug=debug):
        config = read_config(settings, context.args)
        from slideformer.train.console import open_console
        from slideformer.train.stop import Stopped
        from slideformer.train.trainer import train as run

        try:
            with open_console(sys.stdout) as console:
                run(config, console)
        except Stopped as stopped:
            say(str(stopped))
            raise typer.Exit(128 + stopped.signum) from None
