"""Where the rows of a dataset come from, whatever that is: one file, a folder, the hub."""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slideformer.config import DatasetSpec
from slideformer.data.files import files_of, read_file, suffix_of
from slideformer.data.formats import RowFormat
from slideformer.data.hub import HubDataset, is_saved_by_datasets
from slideformer.data.rows import RawRow
from slideformer.errors import BadInput

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet")


Rows = Iterable[Mapping[str, object]]  # given in Python


@dataclass(frozen=True, slots=True)
class RowSource:
    """The rows of one dataset, in an order of their own that is always the same.

    name: what reports call it. Rows are those of local `files`, of `hub`, or `given` in Python. passed_over: files of
    a folder that are not read.
    """

    name: str
    row_format: RowFormat
    max_rows: int | None
    files: tuple[Path, ...] = ()
    hub: HubDataset | None = None
    passed_over: tuple[Path, ...] = ()
    given: Rows | None = None

    def rows(self) -> Iterator[RawRow]:
        """Every row, up to max_rows. Raises as the readers of `files` and `hub` do."""
        if self.given is not None:
            every = _given(self.given, self.name)
        else:
            every = self.hub.rows() if self.hub else itertools.chain.from_iterable(map(read_file, self.files))
        return itertools.islice(every, self.max_rows)

    def outline(self) -> list[object]:
        """What can be told of the rows without reading them: sizes of files, or the name of a dataset."""
        where = [self.hub.path, self.hub.name, self.hub.split] if self.hub else [p.stat().st_size for p in self.files]
        return [self.max_rows, *where]

    def identity(self) -> str | None:
        """A digest of the content of all files and of their names; None where there is none to be had."""
        if self.hub or self.given is not None:
            return self.hub.identity() if self.hub else None
        total = hashlib.blake2b(digest_size=16)
        for path in self.files:
            if not path.is_file():
                raise BadInput(f"the data file {path} does not exist")
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            except OSError as error:
                raise BadInput(f"the data file {path} cannot be read: {error.strerror or error}") from None
            total.update(f"{path}\n".encode() + content.digest())
        return total.hexdigest()


def open_source(
    spec: DatasetSpec, *, text_field: str, max_rows: int | None = None, streaming: bool = False
) -> RowSource:
    """Find out what the path of a dataset names. Raises BadInput: nothing, or a folder without the wanted files."""
    path = Path(spec.path)
    row_format = RowFormat(spec.format, text_field, spec.columns)
    hub = None
    if path.is_dir() and is_saved_by_datasets(path):
        hub = HubDataset(spec.path, spec.name, spec.split or "train", streaming=False)
    elif path.is_dir():
        files, others = files_of(path, spec.split)
        return RowSource(spec.path, row_format, max_rows, tuple(files), passed_over=tuple(others))
    elif not path.exists() and HUB_ID.fullmatch(spec.path) and suffix_of(path) not in DATA_SUFFIXES:
        hub = HubDataset(spec.path, spec.name, spec.split or "train", streaming)
    elif not path.exists() and glob.has_magic(spec.path):
        files = [Path(found) for found in sorted(glob.glob(spec.path, recursive=True)) if Path(found).is_file()]
        if not files:
            raise BadInput(f"no file matches {spec.path}: check the pattern, or where you are ({Path.cwd()})")
        return RowSource(spec.path, row_format, max_rows, tuple(files))
    if hub is None and (spec.split or spec.name):
        key = "split" if spec.split else "name"
        raise BadInput(f"{key} of the dataset {spec.path} has no meaning for a file: it is for folders and the hub")
    return RowSource(spec.path, row_format, max_rows, () if hub else (path,), hub)


def _given(rows: Rows, name: str) -> Iterator[RawRow]:
    """Rows are numbered from 1. Raises BadInput for one that is no mapping."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise BadInput(f"{name}:{number} is a {type(row).__name__}; a row is a mapping from column names to values")
        yield RawRow(name, number, {key: _plain(value) for key, value in row.items()})


def _plain(value: object) -> object:
    """Arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value
