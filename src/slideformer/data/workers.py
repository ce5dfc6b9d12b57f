"""Rows to samples, a chunk at a time, in this process or in several; the result is the same for any number of them."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice

import numpy as np

from slideformer.data.encode import Encoded, EncodingRules, Remark, encode_row
from slideformer.data.formats import RowFormat
from slideformer.data.rows import RawRow, Reason, UnusableRow
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput, RunFailed

CHUNK_ROWS = 256
CHUNKS_AHEAD = 4  # a process; read, but not yet taken

Place = tuple[str, int]  # the file and number of a row


@dataclass(slots=True)
class Chunk:
    """What became of some rows. samples, places: alike in length, in the order of the rows."""

    rows_read: int = 0
    rows_kept: int = 0
    samples: list[Encoded] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    dropped: list[tuple[Reason, Place]] = field(default_factory=list)
    first_unusable: str = ""

    def arrays(self) -> dict[str, np.ndarray]:
        """As `SampleWriter.add` takes them, the names of the files aside."""
        samples = self.samples
        return {
            "input_ids": np.concatenate([s.input_ids for s in samples], dtype=np.int32),
            "labels": np.concatenate([s.labels for s in samples], dtype=np.int32),
            "lengths": np.array([len(s.input_ids) for s in samples], np.int64),
            "numbers": np.array([number for _, number in self.places], np.int64),
            "remarks": np.array([int(s.remarks) for s in samples], np.uint8),
        }

    def remarked(self) -> Iterator[tuple[Remark, Place]]:
        for sample, place in zip(self.samples, self.places, strict=True):
            for remark in sample.remarks:
                yield remark, place


@dataclass(frozen=True, slots=True)
class Encoder:
    """All it takes to turn rows into samples; it travels to other processes."""

    codec: Codec
    row_format: RowFormat
    rules: EncodingRules
    strict: bool

    def identity(self) -> dict[str, object]:
        """All that decides what a row becomes, as JSON."""
        return {
            "codec": self.codec.identity,
            "format": asdict(self.row_format),
            "rules": asdict(self.rules),
            "strict": self.strict,
        }

    def encode(self, rows: Sequence[RawRow]) -> Chunk:
        """Raises BadInput as `encode_row` does and, if strict, for the first row that cannot be used."""
        chunk = Chunk(rows_read=len(rows))
        for row in rows:
            try:
                samples = list(encode_row(row, self.row_format, self.codec, self.rules))
            except UnusableRow as error:
                if self.strict:
                    raise BadInput(f"{row.where}: {error} (strict is true)") from None
                chunk.first_unusable = chunk.first_unusable or f"{row.where}: {error}"
                chunk.dropped.append((error.reason, (row.name, row.number)))
                continue
            chunk.rows_kept += 1
            chunk.samples += samples
            chunk.places += [(row.name, row.number)] * len(samples)
        return chunk


def encode_all(
    rows: Iterable[RawRow], encoder: Encoder, *, num_proc: int = 1, chunk_rows: int | None = None
) -> Iterator[Chunk]:
    """Chunks in the order of the rows. num_proc: processes; 1: this one.

    Raises what reading and encoding raise, for the first row in order that does, and RunFailed if a process dies.
    """
    groups = _groups(rows, chunk_rows or CHUNK_ROWS)
    if num_proc == 1:
        yield from map(encoder.encode, groups)
        return
    # Not forked: torch and the tokenizer have threads by now, and a fork would copy their locks.
    start = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_proc, start, initializer=_begin, initargs=(encoder,))
    try:
        yield from _in_order(groups, pool, CHUNKS_AHEAD * num_proc)
    except BrokenProcessPool:
        raise RunFailed(
            "a process that encodes rows has died: if memory is short, lower dataset_num_proc; in a script of your "
            'own, start from under `if __name__ == "__main__":`'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(rows: Iterable[RawRow], chunk_rows: int) -> Iterator[Sequence[RawRow]]:
    reading = iter(rows)
    while group := tuple(islice(reading, chunk_rows)):
        yield group


def _in_order(groups: Iterator[Sequence[RawRow]], pool: ProcessPoolExecutor, ahead: int) -> Iterator[Chunk]:
    waiting: deque[Future[Chunk]] = deque()
    trouble: BadInput | None = None
    while True:
        try:
            group = next(groups, None)
        except BadInput as error:  # of a file; the rows before it are encoded first, as they are by one process
            trouble = error
            break
        if group is None:
            break
        waiting.append(_submitted(pool, group))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
    if trouble is not None:
        raise trouble


def _submitted(pool: ProcessPoolExecutor, group: Sequence[RawRow]) -> Future[Chunk]:
    """The first one starts the processes, which inherit that Ctrl-C is blocked: a terminal sends it to all of them, and
    it is for this one to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return pool.submit(_encode, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# in the other processes

_own: list[Encoder] = []


def _begin(encoder: Encoder) -> None:
    _own.append(encoder)


def _encode(rows: Sequence[RawRow]) -> Chunk:
    return _own[0].encode(rows)
