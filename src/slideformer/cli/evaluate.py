"""slideformer evaluate"""

from __future__ import annotations

import json
import sys

import typer

from slideformer.cli.arguments import Debug, Json, Settings, read_config
from slideformer.cli.exits import told_in_one_sentence


def evaluate(context: typer.Context, settings: Settings = None, as_json: Json = False, debug: Debug = False) -> None:
    """Show the loss of a model on the evaluation sets of a config, per target token. Trains and writes nothing.

    A result of training is evaluated with model_name_or_path=ITS_FOLDER. Takes 2 bytes a parameter on the host in
    bf16, 4 in fp32: no optimizer state.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json):
        config = read_config(settings, context.args)
        from slideformer.train.console import PlainConsole
        from slideformer.train.only import evaluate_only

        metrics = evaluate_only(config, PlainConsole(sys.stderr))
        print(json.dumps(metrics, indent=2) if as_json else "\n".join(f"{k} {v:.4f}" for k, v in metrics.items()))
