"""slideformer preview"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from slideformer.cli.arguments import Debug, Json, Settings, read_config
from slideformer.cli.exits import say, told_in_one_sentence

if TYPE_CHECKING:
    from rich.text import Text

    from slideformer.config import TrainConfig
    from slideformer.data import SeenRow
    from slideformer.data.seen import Segment

Rows = Annotated[int, typer.Option(min=1, help="How many rows to show.")]
Step = Annotated[int, typer.Option(min=1, help="The step to begin with.")]
TRAINED, OTHER, FRAME = "bold green", "dim", "cyan"
BEGIN, END = "⟦", "⟧"  # around what is trained, where there is no colour


def preview(
    context: typer.Context,
    settings: Settings = None,
    rows: Rows = 5,
    step: Step = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show rows as the model sees them in training: their text, and which tokens are trained.

    Reads the data and the tokenizer, not the weights. What is shown is decoded from the tensors of the first steps.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json):
        config = read_config(settings, context.args)
        from slideformer.data import codec_of, load_dataset, seen_rows, training_batches

        codec = codec_of(config)
        dataset = load_dataset(config, codec, say)
        batches = training_batches(dataset, config, codec)
        num_steps = batches.num_steps(epochs=config.num_train_epochs, max_steps=config.max_steps)
        found = seen_rows(batches, codec, num_rows=rows, first_step=step, num_steps=num_steps)
        warnings = [warning for part in (*dataset.reports, batches) for warning in part.warnings()]
        if as_json:
            reports = [report.as_dict() for report in dataset.reports]
            content = {"data": reports, "warnings": warnings, "num_steps": num_steps}
            print(json.dumps({**content, "rows": [row.as_dict() for row in found]}, indent=2, ensure_ascii=False))
            return
        for report in dataset.reports:
            print("\n".join(report.lines()))
        for warning in warnings:
            say(f"warning: {warning}")
        _show(found, num_steps, config)


def _show(rows: list[SeenRow], num_steps: int, config: TrainConfig) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    coloured = console.color_system is not None and not console.no_color
    micro_batches, size = config.gradient_accumulation_steps, config.per_device_train_batch_size
    console.print(f"\n{num_steps:,} steps of {micro_batches} x {size} rows; trained tokens are ", end="")
    console.print(Text("like this", TRAINED) if coloured else f"{BEGIN}like this{END}")
    for row in rows:
        share = row.num_trained / max(row.num_tokens, 1)
        head = f"step {row.step}, micro-batch {row.micro_batch}, row {row.row}: {row.num_tokens:,} tokens, "
        head += f"{row.num_trained:,} trained ({share:.0%}), {row.num_padding:,} padding"
        console.print(Text(f"\n{head}", FRAME))
        for sample in row.samples:
            notes = "".join(f"; {note}" for note in sample.notes)
            counts = f", {sample.num_tokens:,} tokens, {sample.num_trained:,} trained" if len(row.samples) > 1 else ""
            console.print(Text(f"{sample.where}{counts}{notes}", FRAME))
            console.print(_marked(sample.segments, coloured=coloured))
    if not rows:
        console.print(f"\nthere is no such step: the run has {num_steps:,}")


def _marked(segments: Iterable[Segment], *, coloured: bool) -> Text:
    from rich.text import Text

    text = Text()
    for segment in segments:
        shown = _printable(segment.text)
        if coloured:
            text.append(shown, TRAINED if segment.trained else OTHER)
        else:
            text.append(f"{BEGIN}{shown}{END}" if segment.trained else shown)
    return text


def _printable(text: str) -> str:
    """Data may hold what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
