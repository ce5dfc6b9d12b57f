"""A file of one JSON object a line that a run appends to. A disk that refuses one costs that line and not the run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Self

from slideformer.model import files

log = logging.getLogger(__name__)


class LinesFile:
    """Context manager; a line is in the file when `write` returns, on disk after `flush`.

    Nothing is buffered, so leaving a run whose disk hangs writes nothing.
    """

    def __init__(self, path: Path, *, kept: str = "") -> None:
        """kept: the lines to start with."""
        self._path, self._kept = path, kept
        self._torn = self._told = False

    def __enter__(self) -> Self:
        """Raises OSError."""
        files.replace_text(self._path, self._kept)
        self._file: FileIO = open(self._path, "ab", buffering=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, line: Mapping[str, object]) -> None:
        """Append one line. A disk that refuses is told of in the log, once."""
        text = ("\n" if self._torn else "") + json.dumps(line, ensure_ascii=False) + "\n"
        try:
            files.Summing(self._file).write(text.encode(errors="backslashreplace"))
            self._torn = False
        except OSError as error:
            self._torn = True
            self._tell(error)

    def flush(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning("%s cannot be written (%s): lines are missing until there is room", self._path, error.strerror)
