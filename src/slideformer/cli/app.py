"""The commands by name."""

from __future__ import annotations

import sys

import typer

from slideformer.cli.bench import bench
from slideformer.cli.config import config_app, show, validate
from slideformer.cli.doctor import doctor
from slideformer.cli.evaluate import evaluate
from slideformer.cli.exits import told_of_bad_words, watched_output
from slideformer.cli.export import export
from slideformer.cli.generate import generate
from slideformer.cli.plan import plan
from slideformer.cli.preview import preview
from slideformer.cli.report import report
from slideformer.cli.train import train

app = typer.Typer(
    rich_markup_mode=None,  # rich's boxes cost a third of the time in which a wrong word is answered
    help="Full-parameter fine-tuning of language models through a sliding window of layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What the commands do not know themselves are settings: key=value, --key value.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(context_settings=SETTINGS)(train)
app.command(context_settings=SETTINGS)(plan)
app.command(context_settings=SETTINGS)(bench)
app.command(context_settings=SETTINGS)(preview)
app.command()(doctor)
app.command(context_settings=SETTINGS)(evaluate)
config_app.command(context_settings=SETTINGS)(show)
config_app.command(context_settings=SETTINGS)(validate)
app.add_typer(config_app, name="config")
app.command()(generate)
app.command()(export)
app.command()(report)


def main() -> None:
    """Run the command line and exit: 0 ok, 1 run failed, 2 bad input, 3 does not fit, 128 + signal when stopped."""
    with watched_output(), told_of_bad_words(as_json="--json" in sys.argv):
        sys.exit(app(prog_name="slideformer", standalone_mode=False))
