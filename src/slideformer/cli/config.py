"""slideformer config init, show, validate, schema"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from slideformer.cli.arguments import Debug, Json, Settings, read_config
from slideformer.cli.exits import told_in_one_sentence
from slideformer.errors import BadInput

STARTER = """\
# slideformer train {name}
# All keys and their defaults: slideformer config show {name}

model_name_or_path: path/to/a/hugging-face/folder
dataset: data.jsonl # rows of {{"messages": [...]}}, or one of the layouts in docs/data.md
output_dir: runs/mine

max_length: 1024
packing: false # true: several short rows side by side, none of which sees another

per_device_train_batch_size: 4
gradient_accumulation_steps: 2 # weights cross the link once a step, however many micro-batches
num_train_epochs: 1
learning_rate: 1e-5
lr_scheduler_type: cosine
warmup_ratio: 0.03
max_grad_norm: 1.0

val_size: 0.05 # a share of the rows is only evaluated; or eval_dataset: other.jsonl
save_steps: 500
resume_from_checkpoint: auto # go on where a run in output_dir was interrupted
report_to: none # or tensorboard, trackio, wandb, mlflow
# max_gpu_memory: 24GiB # what this run may take of the GPU; everything else stays in host memory
# offload_dir: /nvme/this-run # what has no room in host memory lies in this folder of a fast disk
"""

Target = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]

config_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Write, show and check config files, without loading anything."
)


@config_app.command("init")
def init(
    target: Target = Path("train.yaml"), force: Force = False, as_json: Json = False, debug: Debug = False
) -> None:
    """Write a config file to start from, with a comment on each choice."""
    with told_in_one_sentence(debug=debug, as_json=as_json):
        if target.exists() and not force:
            raise BadInput(f"{target} is there already: give another name, or --force to replace it")
        try:
            target.write_text(STARTER.format(name=target.name), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{target} cannot be written: {error.strerror}: choose another place") from None
        print(json.dumps({"written": str(target)}) if as_json else f"{target} is written: fill in the first two lines")


def show(context: typer.Context, settings: Settings = None, as_json: Json = False, debug: Debug = False) -> None:
    """Print every key with the value it has in the end: aliases, defaults and command line worked in."""
    with told_in_one_sentence(debug=debug, as_json=as_json):
        values = read_config(settings, context.args).model_dump(mode="json")
        print(json.dumps(values, indent=2) if as_json else yaml.safe_dump(values, sort_keys=False).rstrip())


def validate(context: typer.Context, settings: Settings = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check keys, values and the rules between them. Reads no model and no data: train --dry-run does."""
    with told_in_one_sentence(debug=debug, as_json=as_json):
        config = read_config(settings, context.args)
        epochs = _counted(config.num_train_epochs, "epoch")
        steps = _counted(config.max_steps, "step") if config.max_steps > 0 else epochs
        text = (
            f"valid: {steps} of {config.per_device_train_batch_size} x {config.gradient_accumulation_steps} = "
            f"{_counted(config.rows_per_step, 'sequence')}, {config.update_program} updates"
        )
        print(json.dumps({"valid": True}) if as_json else text)


def _counted(number: float, what: str) -> str:
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{text} {what}" if number == 1 else f"{text} {what}s"


@config_app.command("schema")
def schema(as_json: Json = False, debug: Debug = False) -> None:
    """Print the JSON schema of a config file, for editors that complete and check YAML. Always JSON."""
    with told_in_one_sentence(debug=debug, as_json=as_json):
        from slideformer.config import TrainConfig

        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
