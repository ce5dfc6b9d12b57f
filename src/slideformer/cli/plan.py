"""slideformer plan"""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from slideformer.cli.arguments import Debug, Json, Settings, read_config
from slideformer.cli.exits import told_in_one_sentence
from slideformer.errors import BadInput

Tflops = Annotated[float | None, typer.Option(help="Of the device in training.", show_default=False)]
Link = Annotated[float | None, typer.Option(help="GB/s between host and device, each way.", show_default=False)]
Disk = Annotated[float | None, typer.Option(help="GB/s of the disk, read and written at once.", show_default=False)]
Update = Annotated[float | None, typer.Option(help="Billions of parameters updated a second.", show_default=False)]


def plan(
    context: typer.Context,
    settings: Settings = None,
    tflops: Tflops = None,
    link_gbps: Link = None,
    update_gparams: Update = None,
    disk_gbps: Disk = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a config takes: bytes on each tier and the timeline of a step, without loading weights.

    Needs only the model's config.json. Times are those of a machine like the one they were measured on, unless its
    rates are given; `slideformer doctor` measures them.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json) as beside:
        names = ("--tflops", "--link-gbps", "--update-gparams", "--disk-gbps")
        for name, rate in zip(names, (tflops, link_gbps, update_gparams, disk_gbps), strict=True):
            if rate is not None and not 0 < rate < math.inf:
                raise BadInput(f"{name} is {rate:g}, must be above 0: give what is measured, or leave it out")
        config = read_config(settings, context.args)
        from slideformer.train.plan import plan_run

        found = plan_run(
            config,
            elsewhere=True,
            flops=tflops and tflops * 1e12,
            link_nbytes=link_gbps and link_gbps * 1e9,
            update_numel=update_gparams and update_gparams * 1e9,
            disk_nbytes=disk_gbps and disk_gbps * 1e9,
        )
        if not as_json:
            print(found.text())
        beside.update(found.as_dict())
        found.require_fit()
        if as_json:
            print(json.dumps(beside, indent=2))
