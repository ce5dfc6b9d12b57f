"""The samples of a dataset as a few flat arrays, in memory or in files that are mapped into it.

A million samples are seven arrays, not a million objects; a Sample is made when one is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import torch

from slideformer.data.encode import IGNORED, Remark, describe

TOKENS = ("input_ids", "labels")
INDEX = ("starts", "lengths", "names", "numbers", "remarks")
DTYPES = {
    **{"input_ids": np.int32, "labels": np.int32, "starts": np.int64, "lengths": np.int64},
    **{"names": np.int32, "numbers": np.int64, "remarks": np.uint8},
}
HEADER_NBYTES = 128  # of a .npy file with one axis, whatever its length: numpy leaves room for it to grow


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence. input_ids, labels: int32 [n], labels not shifted, not to be written to. where: its row."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    where: str
    remarks: Remark = Remark.NONE

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_target_tokens(self) -> int:
        """Learned tokens. The first token of a sequence has nothing before it to be predicted from."""
        return int((self.labels[1:] != IGNORED).sum())

    def notes(self) -> Sequence[str]:
        """What is unusual about it, in words."""
        return describe(self.remarks)


@dataclass(frozen=True, slots=True, eq=False)
class Samples(Sequence[Sample]):
    """input_ids, labels: int32, all samples one behind the other. The other arrays have an entry a sample.

    starts, lengths: where it lies. names: index into `files`. numbers: of its row there.
    """

    files: tuple[str, ...]
    input_ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    names: np.ndarray
    numbers: np.ndarray
    remarks: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self.starts[index], self.starts[index] + self.lengths[index]
        return Sample(
            torch.from_numpy(self.input_ids[start:stop]),
            torch.from_numpy(self.labels[start:stop]),
            f"{self.files[self.names[index]]}:{self.numbers[index]}",
            Remark(int(self.remarks[index])),
        )

    def subset(self, indices: Sequence[int] | np.ndarray) -> Samples:
        """Some of the samples, in the order given. Shares the tokens."""
        chosen = {name: getattr(self, name)[indices] for name in INDEX}
        return Samples(self.files, self.input_ids, self.labels, **chosen)


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each."""
    return samples.lengths.tolist() if isinstance(samples, Samples) else [len(sample) for sample in samples]


def token_runs(samples: Sequence[Sample]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """input_ids and labels of all samples, one behind the other, in stretches of many samples where they lie so."""
    if not isinstance(samples, Samples):
        for sample in samples:
            yield sample.input_ids.numpy(), sample.labels.numpy()
        return
    ends = samples.starts + samples.lengths
    for run in np.split(np.arange(len(samples)), np.flatnonzero(samples.starts[1:] != ends[:-1]) + 1):
        if len(run):
            start, stop = samples.starts[run[0]], ends[run[-1]]
            yield samples.input_ids[start:stop], samples.labels[start:stop]


class SampleWriter:
    """Writes samples into the .npy files of a folder as they come. A context manager; `close` ends the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._counts = dict.fromkeys(DTYPES, 0)
        self._next_start = 0

    def __enter__(self) -> Self:
        for name in DTYPES:
            file = self._files[name] = open(self._folder / f"{name}.npy", "wb")
            file.write(bytes(HEADER_NBYTES))
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, **arrays: np.ndarray) -> None:
        """Append the arrays of some samples: all of `Samples` but `starts`, which follow from the lengths."""
        lengths = arrays["lengths"]
        ends = self._next_start + np.cumsum(lengths, dtype=np.int64)
        arrays["starts"] = ends - lengths
        self._next_start = int(ends[-1]) if len(ends) else self._next_start
        for name, dtype in DTYPES.items():
            self._files[name].write(np.ascontiguousarray(arrays[name], dtype).data)
            self._counts[name] += len(arrays[name])

    def close(self) -> None:
        """Write the headers and flush everything to disk."""
        for name, file in self._files.items():
            file.seek(0)
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(DTYPES[name])), "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (self._counts[name],)})
            assert file.tell() == HEADER_NBYTES
            file.flush()
            os.fsync(file.fileno())


def map_samples(folder: Path, files: Sequence[str]) -> Samples:
    """The samples that a writer left in a folder. Tokens stay on disk until they are looked at.

    Raises ValueError or OSError for what is no such folder, or is cut off.
    """
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in TOKENS}
    arrays |= {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in INDEX}
    wrong = [name for name, array in arrays.items() if array.dtype != DTYPES[name] or array.ndim != 1]
    counts = {len(arrays[name]) for name in INDEX}
    if wrong or len(counts) > 1 or len(arrays["input_ids"]) != len(arrays["labels"]):
        raise ValueError(f"{folder} does not hold samples: {json.dumps(wrong or sorted(counts))}")
    if arrays["lengths"].sum() != len(arrays["input_ids"]):
        raise ValueError(f"{folder} holds {len(arrays['input_ids'])} tokens of {arrays['lengths'].sum()}")
    return Samples(tuple(files), **arrays)
