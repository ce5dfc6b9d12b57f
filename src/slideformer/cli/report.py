"""slideformer report"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from slideformer.cli.arguments import Debug, Json
from slideformer.cli.exits import told_in_one_sentence
from slideformer.errors import BadInput

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a run, finished or not.")]
Target = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where to write it.", show_default="RUN/report.html")
]


def report(run: Run, target: Target = None, as_json: Json = False, debug: Debug = False) -> None:
    """Write one HTML page about a run: loss, speed, memory, the lanes of a step, data, config.

    The page needs no other file and no network.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json):
        from slideformer.train import page

        text = page.report(run)
        target = target or run / "report.html"
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{target} cannot be written: {error.strerror}: give another --output") from None
        print(json.dumps({"written": str(target)}) if as_json else f"the report is in {target}")
