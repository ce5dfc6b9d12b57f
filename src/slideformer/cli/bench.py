"""slideformer bench"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from slideformer.cli.arguments import Debug, Json, Settings, read_config
from slideformer.cli.exits import ended_by_signals, say, told_in_one_sentence

Steps = Annotated[int, typer.Option(min=1, help="How many steps to time, after two of warm-up.")]


def bench(
    context: typer.Context,
    settings: Settings = None,
    steps: Steps = 5,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time training steps of a config, with random weights and random tokens: how fast it will be, and what binds.

    Needs only the model's config.json, and no dataset. Every sequence is max_length tokens long. Nothing is written but
    what the config keeps in offload_dir meanwhile.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json):
        config = read_config(settings, context.args, required=("model_name_or_path",))
        from slideformer.train.bench import run_bench

        with ended_by_signals(as_json=as_json):
            found = run_bench(config, steps=steps, told=say)
        print(json.dumps(found.as_dict(), indent=2) if as_json else found.text())
