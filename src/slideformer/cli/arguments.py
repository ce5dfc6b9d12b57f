"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slideformer.cli.exits import say

if TYPE_CHECKING:
    from slideformer.config import TrainConfig

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.yaml key=value --key value",
        help="A config file, and settings that win over those in it.",
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where in the program an error comes from.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def read_config(
    settings: Sequence[str] | None, extra: Sequence[str], required: Sequence[str] | None = None
) -> TrainConfig:
    """The config of a command's arguments; says what about their spelling is worth knowing. Raises BadInput.

    required: keys that must be there; None: those that training needs.
    """
    from slideformer.cli.config_file import load_config  # pydantic takes longer to import than --help to answer

    words = [*(settings or ()), *extra]
    is_file = bool(words) and not words[0].startswith("-") and "=" not in words[0]
    path, overrides = (Path(words[0]), words[1:]) if is_file else (None, words)
    resolved = load_config(path, overrides, required)
    for notice in resolved.notices:
        say(f"note: {notice}")
    return resolved.config
