"""A stream for what a run tells, whose failure does not end the run: a reader that went away, a full disk."""

from __future__ import annotations

import logging
from typing import TextIO

log = logging.getLogger(__name__)


class Steady:
    """Writes to `stream` until that fails; says so once, as a warning of the log, and drops the rest.

    Everything else is the stream's own: whether it is a terminal, its encoding, its number.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.lost = stream, False

    def write(self, text: str) -> int:
        try:
            if not self.lost:
                self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:  # the latter: it has been closed
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            if not self.lost:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.lost = True
        reason = getattr(error, "strerror", None) or str(error)
        log.warning("the run goes on unseen, because its output cannot be written (%s): see metrics.jsonl", reason)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def steady(stream: TextIO | Steady) -> Steady:
    return stream if isinstance(stream, Steady) else Steady(stream)
