"""Local files of rows: JSON, JSON lines, parquet, CSV and plain text, also gzipped, and folders of them.

Every reader goes through its file once and holds a stretch of it, never the whole.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from slideformer.data.rows import Block, RawRow
from slideformer.errors import BadInput

BLOCK_CHARS = 2**20
"""Plain text is cut into stretches of so many characters, at the next line's end: a tokenizer takes about 100 bytes a
character of what it is given at once."""
READ_CHARS = 2**20
PARQUET = ".parquet"
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json")  # lie beside rows and hold none
NOT_JSON = (ValueError, RecursionError)  # what json raises: the second for [[[[..., the first also for endless numbers
TABLE_ROWS = 256  # of a parquet file, turned into Python objects at once
SPLITS = {
    **{name: "train" for name in ("train", "training")},
    **{name: "test" for name in ("test", "testing")},
    **{name: "validation" for name in ("validation", "valid", "val", "dev", "eval")},
}
"""Words in the names of files, and the split that such a file belongs to."""


def read_file(path: Path, name: str | None = None) -> Iterator[RawRow]:
    """The rows of one file. name: what messages call it, the path if not given.

    Raises BadInput: no such file, a suffix that is not known, not UTF-8, broken JSON, CSV, gzip or parquet.
    """
    called = name or str(path)
    if not path.is_file():
        raise BadInput(f"the data file {called} does not exist")
    suffix = suffix_of(path)
    if suffix not in (*READERS, PARQUET):
        raise BadInput(f"the data file {called} ends in {path.suffix or 'nothing'}; accepted are {SUFFIXES}")
    if suffix == PARQUET:
        yield from _parquet(path, called)
        return
    try:
        with _opened(path, newline="" if suffix in (".csv", ".tsv") else None) as file:
            yield from READERS[suffix](file, called)
    except UnicodeDecodeError as error:
        raise BadInput(f"the data file {called} is not UTF-8: {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput(f"the data file {called} is no complete gzip file: {error}") from None
    except OSError as error:
        raise BadInput(f"the data file {called} cannot be read: {error.strerror or error}") from None


def files_of(folder: Path, split: str | None) -> tuple[list[Path], list[Path]]:
    """The files of a folder that have rows, in the order of their names, and the others. Hidden ones are neither.

    Where names say which split a file belongs to (train.jsonl, data/test-00000.parquet), only those of `split` count,
    or of train if there is none. Raises BadInput: no file of rows, or none of that split, or one that is a link out of
    the folder: one from elsewhere could have a model learn this machine's own files.
    """
    every = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    usable = [path for path in every if suffix_of(path) in (*READERS, PARQUET) and path.name not in ABOUT_DATA]
    if not usable:
        raise BadInput(f"the data folder {folder} has no file of rows; accepted are {SUFFIXES}")
    splits = {path: split_of(path.relative_to(folder)) for path in usable}
    named = sorted({found for found in splits.values() if found})
    if split is None and not named:
        require_inside(folder, usable)
        return usable, [path for path in every if path not in usable]
    wanted = SPLITS.get(split or "train", split or "train")
    chosen = [path for path in usable if splits[path] == wanted]
    if not chosen:
        found = f"its files are of the splits {', '.join(named)}" if named else "the names of its files say no split"
        raise BadInput(f"the data folder {folder} has nothing of the split {wanted}: {found}: set split of the dataset")
    require_inside(folder, chosen)
    return chosen, [path for path in every if path not in chosen]


def require_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Raise BadInput for one that is a link to a place outside of the folder. The hub's cache links into itself."""
    home = folder.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    for path in paths:
        if not any(path.resolve().is_relative_to(place) for place in allowed):
            raise BadInput(f"{path} leads out of its folder, to {path.resolve()}: put the file itself there")


def suffix_of(path: Path) -> str:
    """The last suffix, .gz aside, in small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"] and suffixes[-2:-1] != [PARQUET]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def split_of(path: Path) -> str | None:
    """train, validation or test, where a word in the path says so."""
    words = re.split(r"[^a-z]+", path.as_posix().lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _opened(path: Path, newline: str | None) -> TextIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _json_lines(file: TextIO, name: str) -> Iterator[RawRow]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                value = json.loads(line.rstrip("\r\n"))  # or what is missing at its end is missed in another line
            except NOT_JSON as error:
                raise BadInput(f"{name}:{number}: not valid JSON: {_why(error)}") from None
            if not isinstance(value, dict):
                raise BadInput(f"{name}:{number}: expected a JSON object in each line, found a {type(value).__name__}")
            yield RawRow(name, number, value)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{_what(error)} at column {error.colno}"
    return "it is nested too deep" if isinstance(error, RecursionError) else "a number has too many digits"


def _what(error: json.JSONDecodeError) -> str:
    return error.msg.removesuffix(" at")  # of "Unterminated string starting at"


def _json(file: TextIO, name: str) -> Iterator[RawRow]:
    """A list of objects, or objects one behind the other. Rows are numbered from 1 in both."""
    values = _JsonValues(file, name)
    is_list = values.take("[")
    number = 0
    while not values.at_end() and not (is_list and values.take("]")):
        if is_list and number and not values.take(","):
            raise values.broken(number, "expected a comma or the list's end")
        number += 1
        value = values.next(number)
        if not isinstance(value, dict):
            raise BadInput(f"{name}: expected JSON objects, found a {type(value).__name__} as number {number}")
        yield RawRow(name, number, value)
    if is_list and not values.closed:
        raise values.broken(number, "the list does not end")


class _JsonValues:
    """Decodes a file of JSON a value at a time, so that a list of a million objects is never there as a whole."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self._name = file, name
        self._text, self._at, self._ended = "", 0, False
        self._line, self._column = 1, 1  # of the first character of _text
        self._decoder = json.JSONDecoder()
        self.closed = False  # a ] was taken

    def take(self, character: str) -> bool:
        """Go past a character if it is the next that is no white space."""
        if self.at_end() or self._text[self._at] != character:
            return False
        self._at += 1
        self.closed = character == "]"
        return True

    def at_end(self) -> bool:
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or not self._read(READ_CHARS):
                return self._at >= len(self._text)

    def next(self, number: int) -> object:
        """The value that starts here. number: for messages."""
        self.at_end()
        amount = READ_CHARS
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                found = self.broken(number, _what(error), error.pos)
                if not self._read(amount):
                    raise found from None
                amount *= 2  # a value that spans many stretches is tried anew a few times only
            except NOT_JSON as error:
                raise self.broken(number, _why(error)) from None
            else:
                return value

    def broken(self, number: int, what: str, at: int | None = None) -> BadInput:
        """at: in _text; None: here."""
        at = self._at if at is None else at
        line, column = self._place(at)
        near = self._text[at : at + 40]
        then = f"it goes on with {near!r}" if near else "the file ends there"
        return BadInput(f"{self._name}:{line}: not valid JSON: {what} at column {column}, in object {number}; {then}")

    def _place(self, at: int) -> tuple[int, int]:
        """Line and column of a character of _text, from 1."""
        newline = self._text.rfind("\n", 0, at)
        column = self._column + at if newline < 0 else at - newline
        return self._line + self._text.count("\n", 0, at), column

    def _read(self, num_chars: int) -> bool:
        more = "" if self._ended else self._file.read(num_chars)
        self._ended = self._ended or not more
        self._line, self._column = self._place(self._at)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def _csv(file: TextIO, name: str) -> Iterator[RawRow]:
    yield from _delimited(file, name, ",")


def _tsv(file: TextIO, name: str) -> Iterator[RawRow]:
    yield from _delimited(file, name, "\t")


def _delimited(file: TextIO, name: str, delimiter: str) -> Iterator[RawRow]:
    """The first row names the columns, so rows are numbered from 2."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    number = 1
    try:
        for number, columns in enumerate(reader, start=2):
            if None in columns:
                raise BadInput(
                    f"{name}:{number}: the row has more cells than the header: quote cells with {delimiter!r}"
                )
            yield RawRow(name, number, columns)
    except csv.Error as error:
        raise BadInput(f"{name}:{number + 1}: not valid CSV: {error}") from None


def _text(file: TextIO, name: str) -> Iterator[RawRow]:
    number, text = 1, file.read(BLOCK_CHARS) + file.readline(BLOCK_CHARS)
    starts = True
    while text:
        following = file.read(BLOCK_CHARS)
        following += file.readline(BLOCK_CHARS) if following else ""
        yield RawRow(name, number, Block(text, starts, not following))
        number, text, starts = number + text.count("\n"), following, False


def _parquet(path: Path, name: str) -> Iterator[RawRow]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadInput(f"{name} needs pyarrow: pip install 'slideformer[parquet]'") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=TABLE_ROWS):
                for columns in batch.to_pylist():
                    number += 1
                    yield RawRow(name, number, columns)
    except pyarrow.ArrowException as error:
        raise BadInput(f"the data file {name} is no parquet file that can be read: {error}") from None


# Of what is text; parquet is not.
READERS: dict[str, Callable[[TextIO, str], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".txt": _text,
}
SUFFIXES = ".jsonl, .json, .csv, .tsv, .txt (each also with .gz) and .parquet"
