"""Reads settings from a YAML file and from the rest of a command line, each with the place where it was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from slideformer.cli.names import Resolved, Setting, resolve
from slideformer.errors import BadInput

COMMAND_LINE = "command line"


def load_config(path: Path | None, overrides: Sequence[str] = (), required: Sequence[str] | None = None) -> Resolved:
    """The config of a YAML file, changed by `key=value`, `--key value`, `--key=value` or `--key` (for true).

    required: as for `resolve`.

    Raises BadInput for a file that is missing or is no YAML mapping, and for all that `resolve` refuses.
    """
    file = read_file(path) if path is not None else []
    return resolve(file, read_overrides(overrides), required=required)


def read_file(path: Path) -> list[Setting]:
    """The top-level keys of a YAML file, with their lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"there is no config file {path}: check the path, or where you are ({Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the config file {path} cannot be read: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise BadInput(f"{path} is empty: it needs at least model_name_or_path and dataset")
        if not isinstance(root, yaml.MappingNode):
            raise BadInput(f"{path}:{root.start_mark.line + 1}: expected `key: value` lines, found a {root.id}")
        loader = yaml.SafeLoader("")
        return [
            Setting(str(key.value), loader.construct_object(value, deep=True), f"{path}:{key.start_mark.line + 1}")
            for key, value in root.value
        ]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise BadInput(f"{where}: not valid YAML: {_why(error)}") from None
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a date of month 13; [[[[... without end
        raise BadInput(f"{path}: not valid YAML: {_why(error)}") from None


def read_overrides(arguments: Sequence[str]) -> list[Setting]:
    """`key=value`, `--key value`, `--key=value` and `--key`; hyphens in keys are underscores, values are YAML."""
    settings = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not equals:
            raise BadInput(f"{COMMAND_LINE}: {word!r} is neither key=value nor --key value")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") and "=" not in rest[0] else "true"
        settings.append(Setting(key.replace("-", "_"), _value(value, word), COMMAND_LINE))
    return settings


def _value(text: str, word: str) -> object:
    try:
        return yaml.load(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{COMMAND_LINE}: the value in {word[:80]!r} is not valid YAML: {_why(error)}") from None


def _why(error: Exception) -> str:
    if problem := getattr(error, "problem", None):
        return str(problem)
    return "it is nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
