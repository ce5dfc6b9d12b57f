"""How a command ends: its errors as one sentence on standard error, its exit code, and output that is not written."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import NoReturn, TextIO

import typer

from slideformer.errors import BadInput, DoesNotFit, RunFailed

CODES: tuple[tuple[type[Exception], int], ...] = ((BadInput, 2), (DoesNotFit, 3), (RunFailed, 1))
CTRL_C = 130
NO_READER = 141  # what a shell sees of a program that SIGPIPE ended
# Some releases of typer bring a click of their own, and no release exports this class of it.
BadWords = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class OutputLost(OSError):
    """Standard output cannot be written. No errno of its own, so that nobody takes it for another file's."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.cause = cause


@contextmanager
def told_in_one_sentence(*, debug: bool, as_json: bool = False) -> Iterator[dict[str, object]]:
    """Turn our own errors inside into a sentence and an exit code; with debug they keep their traceback.

    as_json: print them as an object on standard output, too. Gives what is to stand beside the error in that object.

    Anything else that is raised is a fault of this program and keeps its traceback.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    beside: dict[str, object] = {}
    try:
        yield beside
    except tuple(kind for kind, _ in CODES) as error:
        if debug:
            raise
        code = next(code for kind, code in CODES if isinstance(error, kind))
        say(f"error: {error}")
        if as_json:
            print(json.dumps({**beside, "error": str(error), "exit_code": code}))
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        if debug:
            raise
        say("stopped by Ctrl-C")
        if as_json:
            print(json.dumps({**beside, "status": "stopped", "error": "stopped by Ctrl-C", "exit_code": CTRL_C}))
        raise typer.Exit(CTRL_C) from None


@contextmanager
def ended_by_signals(*, as_json: bool, beside: Mapping[str, object] | None = None) -> Iterator[None]:
    """Turn the end of work that a signal has asked for into a sentence, an object with as_json, and 128 + its number.
    beside: what is to stand beside the sentence in that object.

    Imports torch.
    """
    from slideformer.train.stop import Stopped

    try:
        yield
    except Stopped as stopped:
        code = 128 + stopped.signum
        say(str(stopped))
        if as_json:
            print(json.dumps({**(beside or {}), "status": "stopped", "error": str(stopped), "exit_code": code}))
        if stopped.at_once:
            leave(code)
        raise typer.Exit(code) from None


@contextmanager
def told_of_bad_words(*, as_json: bool) -> Iterator[None]:
    """Turn what typer refuses (an option that is not known, an argument that is missing) into its words on standard
    error, an object with as_json, and its exit code."""
    try:
        yield
    except BadWords as error:
        error.show()
        if as_json:
            print(json.dumps({"error": error.format_message(), "exit_code": error.exit_code}))
        raise SystemExit(error.exit_code) from None
    except typer.Abort:  # Ctrl-C before a command has begun
        raise SystemExit(CTRL_C) from None


@contextmanager
def watched_output() -> Iterator[None]:
    """Standard output whose failure ends a command, and not with a traceback: with a sentence, or without a word where
    the reader has gone, as `| head` does. What whoever started this has closed is nowhere, and no failure."""
    with ExitStack() as nowhere:
        for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
            if getattr(sys, name) is None:
                nowhere.enter_context(redirect(nowhere.enter_context(open(os.devnull, "w"))))
        with _watched(_Watched(sys.stdout)):
            yield


@contextmanager
def _watched(out: _Watched) -> Iterator[None]:
    try:
        with redirect_stdout(out):
            try:
                yield
            finally:
                out.flush()
    except OutputLost as lost:
        if lost.cause.errno == errno.EPIPE:
            raise SystemExit(NO_READER) from None
        say(f"error: standard output cannot be written ({lost}): make room, or send it elsewhere")
        raise SystemExit(1) from None


class _Watched:
    """A stream that raises OutputLost, once; what is left of its buffer then, and all that comes after, is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a letter that the terminal lacks is no error

    def write(self, text: str) -> int:
        try:
            return 0 if text == "" else self._stream.write(text)  # typer tries with nothing whether it takes text
        except OSError as error:
            raise self._lost(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> OutputLost:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # or Python complains of the buffer when it ends
        os.close(nowhere)
        return OutputLost(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def leave(code: int) -> NoReturn:
    """End the process here and now: threads whose disk hangs would be waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def say(line: str) -> None:
    """A line for people, beside whatever the command's output is."""
    with suppress(OSError):  # nobody is there to be told
        print(line, file=sys.stderr, flush=True)
