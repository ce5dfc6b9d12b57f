"""How a command ends: its errors as one sentence on standard error, and its exit code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from slideformer.errors import BadInput, DoesNotFit, RunFailed

CODES: tuple[tuple[type[Exception], int], ...] = ((BadInput, 2), (DoesNotFit, 3), (RunFailed, 1))
CTRL_C = 130


@contextmanager
def told_in_one_sentence(*, debug: bool, as_json: bool = False) -> Iterator[None]:
    """Turn our own errors inside into a sentence and an exit code; with debug they keep their traceback.

    as_json: print them as an object on standard output, too.

    Anything else that is raised is a fault of this program and keeps its traceback.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        yield
    except tuple(kind for kind, _ in CODES) as error:
        if debug:
            raise
        code = next(code for kind, code in CODES if isinstance(error, kind))
        say(f"error: {error}")
        if as_json:
            print(json.dumps({"error": str(error), "exit_code": code}))
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        if debug:
            raise
        say("stopped by Ctrl-C")
        raise typer.Exit(CTRL_C) from None


def say(line: str) -> None:
    """A line for people, beside whatever the command's output is."""
    print(line, file=sys.stderr, flush=True)
