"""Datasets of the Hugging Face hub, and those that its `datasets` library saved, which is imported only for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slideformer.data.rows import RawRow
from slideformer.errors import BadInput

SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")  # either marks a folder that `save_to_disk` wrote


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One split of a dataset. path: a hub id, or a folder that `save_to_disk` wrote. name: of its configuration."""

    path: str
    name: str | None
    split: str
    streaming: bool

    def rows(self) -> Iterator[RawRow]:
        """Rows are numbered from 1. Raises BadInput: no `datasets` library, or whatever that complains of."""
        for number, columns in enumerate(self._load(), start=1):
            yield RawRow(self.path, number, columns)

    def identity(self) -> str | None:
        """The library's fingerprint of the content; None for a stream."""
        return None if self.streaming else str(self._load()._fingerprint)

    def _load(self):  # of a library that is not there at import
        try:
            import datasets
        except ImportError:
            raise BadInput(
                f"{self.path} is no local file or folder; for a dataset of the hub: pip install 'slideformer[datasets]'"
            ) from None
        try:
            if Path(self.path).is_dir():
                saved = datasets.load_from_disk(self.path)
                return saved if isinstance(saved, datasets.Dataset) else saved[self.split]
            return datasets.load_dataset(self.path, self.name, split=self.split, streaming=self.streaming)
        except Exception as error:  # whatever a wrong name, a wrong split or a network makes the library raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BadInput(
                f"the dataset {self.path} is no local file or folder, and cannot be loaded from the hub: {lines[0]}"
            ) from None


def is_saved_by_datasets(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED_BY_DATASETS)
