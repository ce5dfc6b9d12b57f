"""State on disk: a folder of files for one run, each file a row of extents that are written and read whole.

Blocks of an extent move several at a time, past the page cache where the file system allows that (O_DIRECT), between
the caller's memory and the disk; only ends and unaligned tensors pass through a fixed, small memory of the threads'.
Every read is held to what this run wrote: whatever else is found is an error (`DiskFault`), never a value.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.memory.disk_blocks import Block, Own, Short
from slideformer.memory.disk_claim import Claim, identity, remove_own
from slideformer.memory.disk_direct import open_file, passes_the_cache
from slideformer.memory.disk_extent import PAGE, difference, header, name_digest, padded

log = logging.getLogger(__name__)


class DiskFault(RunFailed):
    """A file did not give or take what it should: an error of the disk, or somebody else changed the file."""


def free_nbytes(path: Path) -> int:
    """Free on the file system of `path`, or of the first folder above that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@dataclass(slots=True)
class Traffic:
    """What went one way. busy_s: seconds in which at least one call was at work."""

    nbytes: int = 0
    busy_s: float = 0.0
    running: int = 0
    since: float = 0.0


class DiskFolder:
    """The folder of one run. Use as a context manager or close it.

    direct: reads and writes pass the page cache. reads, writes: what went each way so far, headers not counted.
    """

    def __init__(self, path: Path, *, keep: bool = False, threads: int = 8, block_nbytes: int = 4 << 20) -> None:
        """path: is made, or is an empty folder. keep: its files stay when it is closed. threads: blocks under way.

        Raises BadInput where the folder cannot be made or written to, or is somebody else's.
        """
        if threads < 1 or block_nbytes < PAGE or block_nbytes % PAGE:
            raise ValueError(f"{threads} threads, blocks of {block_nbytes} bytes: must be 1 or more, and whole pages")
        self.path, self.block_nbytes, self._keep = path, block_nbytes, keep
        self.reads, self.writes = Traffic(), Traffic()
        self._files: dict[str, DiskFile] = {}
        self._traffic_lock = threading.Lock()
        self.claim = Claim(path)
        try:
            self.direct = passes_the_cache(path)
            self._crew = _Crew(threads, block_nbytes)
        except BaseException as error:
            self.claim.release(remove=True)
            if isinstance(error, OSError):
                raise BadInput(f"offload_dir {path} cannot be used: {error.strerror}: choose another") from None
            raise
        if not self.direct:
            log.warning(
                "offload_dir %s has no direct I/O: what is on disk also takes page cache, so host memory may be short "
                "and rates are lower; a local ext4 or xfs has it",
                path,
            )

    @property
    def nbytes(self) -> int:
        """Of all files, headers and padding counted in."""
        return sum(file.nbytes for file in self._files.values())

    def file(self, name: str, extents: Sequence[int]) -> DiskFile:
        """A new file with room for these extents (bytes of data each), all of it taken on the disk now.

        Raises DoesNotFit, or BadInput where the file cannot be made.
        """
        if name in self._files:
            raise ValueError(f"there is a file {name} already")
        self._files[name] = made = DiskFile(self, name, extents)
        return made

    def close(self, *, clean: bool = True) -> None:
        """End the threads, after the blocks that are under way; calls that wait for more fail. Then remove what this
        run made, the folder too if nothing else is in it; not if `keep`, or not `clean`. May be called again."""
        if not self.claim.mine or not self._crew.stop():
            return
        for file in self._files.values():
            file.close(remove=clean and not self._keep)
        self.claim.release(remove=clean and not self._keep)

    def move(self, blocks: int, work: Callable[[int, Own], None], traffic: Traffic, nbytes: int) -> None:
        """For `DiskFile`: work(0 .. blocks - 1) on the threads, and note that so much has moved. Blocks."""
        with self._noting(traffic):
            self._crew.run(blocks, work)
        with self._traffic_lock:
            traffic.nbytes += nbytes

    @contextmanager
    def _noting(self, traffic: Traffic) -> Iterator[None]:
        with self._traffic_lock:
            if traffic.running == 0:
                traffic.since = time.perf_counter()
            traffic.running += 1
        try:
            yield
        finally:
            with self._traffic_lock:
                traffic.running -= 1
                if traffic.running == 0:
                    traffic.busy_s += time.perf_counter() - traffic.since

    def __enter__(self) -> DiskFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Extent:
    offset: int
    nbytes: int
    generation: int = 0
    length: int = -1  # of what the last write left; -1: nothing that can be read
    checksum: int = 0


class DiskFile:
    """A row of extents. Calls block; they may come from several threads at once, for different extents."""

    def __init__(self, folder: DiskFolder, name: str, extents: Sequence[int]) -> None:
        """See `DiskFolder.file`."""
        self.name, self.path, self._folder = name, folder.path / name, folder
        self._digest, self._extents, self.nbytes = name_digest(name), [], 0
        for nbytes in extents:
            self._extents.append(_Extent(self.nbytes, nbytes))
            self.nbytes += PAGE + padded(nbytes)
        free = free_nbytes(folder.path)
        if self.nbytes > free:
            raise self._does_not_fit(free)
        try:
            self._file = open_file(self.path, direct=folder.direct)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be made: {error.strerror}: choose another offload_dir") from None
        self._identity = identity(self._file)
        try:
            if self.nbytes:
                os.posix_fallocate(self._file, 0, self.nbytes)
        except OSError as error:
            self.close(remove=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._does_not_fit(free) from None
            raise BadInput(f"{self.path} cannot be made: {error.strerror}: choose another offload_dir") from None

    def _does_not_fit(self, free: int) -> DoesNotFit:
        return DoesNotFit(
            f"{self.path} needs {self.nbytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there: free some, "
            "choose another offload_dir, or keep more in host memory"
        )

    def write(self, extent: int, source: torch.Tensor) -> None:
        """Replace the data of an extent. source: 1-D, any dtype, host, no longer than the extent; must not change
        meanwhile. Straight from memory if it starts on a page. After a failure the extent cannot be read.

        Raises DiskFault.
        """
        place, data, aligned = self._place(extent, source)
        if len(data) > place.nbytes:
            raise ValueError(f"{len(data)} bytes for extent {extent} of {self.name}, which has {place.nbytes}")
        place.generation += 1
        place.length = -1
        head = header(self._folder.claim.run, self._digest, extent, place.generation, len(data))
        blocks = self._blocks(place, data, aligned)
        sums = [0] * len(blocks)

        def work(index: int, own: Own) -> None:
            sums[index] = own.write(blocks[index], head if index == 0 else None)

        with self._told(extent, "written"):
            self._folder.move(len(blocks), work, self._folder.writes, len(data))
        place.length, place.checksum = len(data), sum(sums) % 2**64

    def read(self, extent: int, target: torch.Tensor) -> None:
        """The data of an extent as the last write left it. target: 1-D, any dtype, host, as many bytes as were
        written; after a failure its contents are undefined. Straight into memory if it starts on a page.

        Raises DiskFault: nothing was written, the last write failed, or something else is there now.
        """
        place, data, aligned = self._place(extent, target)
        if place.length < 0:
            why = "was never written" if place.generation == 0 else "could not be written"
            raise DiskFault(f"extent {extent} of {self.path} {why} and cannot be read")
        if len(data) != place.length:
            raise ValueError(f"{len(data)} bytes for extent {extent} of {self.name}, {place.length} were written")
        expected = header(self._folder.claim.run, self._digest, extent, place.generation, place.length)
        blocks = self._blocks(place, data, aligned)
        sums, heads = [0] * len(blocks), []

        def work(index: int, own: Own) -> None:
            sums[index] = own.read(blocks[index], head=index == 0)
            if index == 0:
                heads.append(bytes(own.head))

        with self._told(extent, "read"):
            self._folder.move(len(blocks), work, self._folder.reads, len(data))
        wrong = difference(heads[0], expected)
        if wrong is None and sum(sums) % 2**64 != place.checksum:
            wrong = "its data was changed"
        if wrong is not None:
            raise DiskFault(f"extent {extent} of {self.path} is not what this run wrote: {wrong}")

    def close(self, *, remove: bool) -> None:
        """For `DiskFolder`."""
        if remove:
            remove_own(self.path, self._identity)
        os.close(self._file)

    def _place(self, extent: int, tensor: torch.Tensor) -> tuple[_Extent, memoryview, bool]:
        """(the extent, the tensor's bytes, whether they start on a page)"""
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} on {tensor.device}: must be 1-D, without gaps, host"
            )
        data = memoryview(tensor.detach().view(torch.uint8).numpy())
        return self._extents[extent], data, tensor.data_ptr() % PAGE == 0

    def _blocks(self, place: _Extent, data: memoryview, aligned: bool) -> list[Block]:
        """At least one, which has the header before it."""
        step, first = self._folder.block_nbytes, place.offset + PAGE
        return [
            Block(self._file, first + start, start // PAGE, data[start : start + step], aligned)
            for start in range(0, max(len(data), 1), step)
        ]

    @contextmanager
    def _told(self, extent: int, done: str) -> Iterator[None]:
        try:
            yield
        except Short as short:
            size = os.fstat(self._file).st_size
            cut = f"the file was cut to {size} of {self.nbytes} bytes" if size < self.nbytes else str(short)
            raise DiskFault(f"extent {extent} of {self.path} could not be {done}: {cut}") from None
        except OSError as error:
            raise DiskFault(f"extent {extent} of {self.path} could not be {done}: {error.strerror}") from error


class _Job:
    """One call's blocks. next: not begun yet. running: begun and not done."""

    __slots__ = ("count", "failure", "next", "running", "work")

    def __init__(self, count: int, work: Callable[[int, Own], None]) -> None:
        self.count, self.work = count, work
        self.next, self.running = 0, 0
        self.failure: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.running == 0 and self.next == self.count


class _Crew:
    """Threads that take blocks from all calls in turn, so that a short call does not wait for all of a long one."""

    def __init__(self, threads: int, block_nbytes: int) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # those with blocks that nobody has begun
        self._stopped = False
        self._threads: list[threading.Thread] = []
        try:
            for index in range(threads):
                thread = threading.Thread(target=self._serve, args=(block_nbytes,), name=f"disk-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.stop()
            raise RunFailed(f"{threads} threads for the disk could not be started ({error}): raise the limit") from None

    def run(self, count: int, work: Callable[[int, Own], None]) -> None:
        """Returns, or raises what the first failing block raised, when no block is under way any more."""
        job = _Job(count, work)
        with self._changed:
            if self._stopped:
                raise RunFailed("the folder on disk is closed")
            self._jobs.append(job)
            self._changed.notify_all()
            while not job.over:
                self._changed.wait()
        if job.failure is not None:
            raise job.failure

    def stop(self) -> bool:
        """Blocks under way are finished, all others dropped. False: it was stopped before."""
        with self._changed:
            if self._stopped:
                return False
            self._stopped = True
            for job in self._jobs:
                self._drop(job, RunFailed("the folder on disk was closed meanwhile"))
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        return True

    def _drop(self, job: _Job, failure: BaseException) -> None:
        job.next, job.failure = job.count, job.failure or failure

    def _serve(self, block_nbytes: int) -> None:
        own = Own(block_nbytes)
        while (taken := self._take()) is not None:
            job, index = taken
            failure: BaseException | None = None
            try:
                job.work(index, own)
            except BaseException as error:  # whatever it is belongs to the caller
                failure = error
            with self._changed:
                job.running -= 1
                if failure is not None:
                    self._drop(job, failure)
                    if job in self._jobs:
                        self._jobs.remove(job)
                if job.over:
                    self._changed.notify_all()

    def _take(self) -> tuple[_Job, int] | None:
        """A block of the call that has waited longest for its turn; None when there is nothing more to come."""
        with self._changed:
            while not self._jobs:
                if self._stopped:
                    return None
                self._changed.wait()
            job = self._jobs.popleft()
            index = job.next
            job.next, job.running = index + 1, job.running + 1
            if job.next < job.count:
                self._jobs.append(job)
            return job, index
