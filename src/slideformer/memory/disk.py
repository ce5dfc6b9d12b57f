"""State on disk: a folder of files for one run, each file a row of extents that are written and read whole.

Blocks of an extent move several at a time, past the page cache where the file system allows that (O_DIRECT), between
the caller's memory and the disk; only ends and unaligned tensors pass through a fixed, small memory of the threads'.
Every read is held to what this run wrote: whatever else is found is an error (`DiskFault`), never a value.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.memory.disk_claim import Claim, identity, remove_own
from slideformer.memory.disk_direct import open_file, passes_the_cache
from slideformer.memory.disk_extent import PAGE, difference, header, name_digest, padded
from slideformer.memory.disk_gds import Gds, GdsFile, device_checksum
from slideformer.memory.disk_stand_in import StandInDisk
from slideformer.native import NativeDisk, ShortFile, Stopped, load_disk

STAND_IN_GBPS = 1.1
"""Written or read, 8 threads (2-core Sapphire Rapids whose disk gives 2, 2026-11-30)."""

log = logging.getLogger(__name__)


class DiskFault(RunFailed):
    """A file did not give or take what it should: an error of the disk, or somebody else changed the file."""


def free_nbytes(path: Path) -> int:
    """Free on the file system of `path`, or of the first folder above that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def no_room(path: Path, nbytes: int, free: int) -> DoesNotFit:
    """nbytes: needed. free: that there are."""
    return DoesNotFit(
        f"{path} needs {nbytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there: free some, choose another "
        "offload_dir, or keep more in host memory"
    )


def heeding_signals(work: Callable[[], int]) -> int:
    """What `work` returns. Python hears signals in the main thread alone, and not while that is in the native library:
    so it waits there for a thread that does the work, and that is left behind if a signal ends the wait."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    done: list[int] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # raised in the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="disk-move", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: better deaf than not at all
        return work()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


@dataclass(slots=True)
class Traffic:
    """What went one way. busy_s: seconds in which at least one call was at work, up to the last begin or end of one."""

    nbytes: int = 0
    busy_s: float = 0.0
    running: int = 0
    since: float = 0.0

    def note(self, change: int) -> None:
        """A call begins (1) or ends (-1)."""
        now = time.perf_counter()
        if self.running:
            self.busy_s += now - self.since
        self.since = now
        self.running += change


class DiskFolder:
    """The folder of one run. Use as a context manager or close it; what nobody closes is closed when Python ends.

    direct: reads and writes pass the page cache. gds: how tensors of a device move, if they may. reads, writes: what
    went each way so far, headers not counted. guard: for whoever keeps something of the files in memory.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: bool = False,
        reuse: bool = False,
        threads: int = 8,
        block_nbytes: int = 1 << 20,
        sums: bool = True,
        gds: bool = False,
    ) -> None:
        """path: is made, or is an empty folder. keep: its files stay when it is closed. reuse: what a killed run left
        there goes, if its claim lists all of it; a run that is at work there is waited for a while. threads: blocks
        under way.
        block_nbytes: an extent's end leaves threads idle for a block's time, and small blocks cost system calls.
        Extents of 16 MiB are read and written at 1.5 and 2.0 GB/s with 1 MiB, 1.3 and 1.7 with 4 (2-core Sapphire
        Rapids, 2026-11-30). sums: without them, data that changes on disk is found only where its extent's header does.
        gds: tensors of a CUDA device may be written and read too.

        Raises BadInput where the folder cannot be made or written to, or is somebody else's.
        """
        if threads < 1 or block_nbytes < PAGE or block_nbytes % PAGE:
            raise ValueError(f"{threads} threads, blocks of {block_nbytes} bytes: must be 1 or more, and whole pages")
        self.path, self.block_nbytes, self.sums, self._keep = path, block_nbytes, sums, keep
        self.gds = Gds(threads=threads, block_nbytes=block_nbytes) if gds else None
        self.reads, self.writes = Traffic(), Traffic()
        self._files: dict[str, DiskFile] = {}
        self._lock, self._closed = threading.Lock(), False
        self.guard = threading.Lock()
        self.claim = Claim(path, reuse=reuse)
        try:
            self.direct = passes_the_cache(path)
            self.threads = _threads(threads, block_nbytes, sums)
        except BaseException as error:
            self.claim.release(remove=True)
            if isinstance(error, OSError):
                raise BadInput(f"offload_dir {path} cannot be used: {error.strerror}: choose another") from None
            raise
        atexit.register(self.close)
        if self.gds is not None and not self.gds.real:
            log.warning(
                "GPUDirect Storage is emulated here: what it moves passes through host memory and is no faster for it"
            )
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

    def remove(self, file: DiskFile) -> None:
        """Give its place on the disk back. No call of it may be at work or follow."""
        del self._files[file.name]
        file.close(remove=True)
        self.claim.forget(file.name)

    def close(self, *, clean: bool = True) -> None:
        """End the threads, after the blocks that are under way; calls that wait for more fail. Then remove what this
        run made, the folder too if nothing else is in it; not if `keep`, or not `clean`. May be called again."""
        with self._lock:
            if self._closed or not self.claim.mine:
                return
            self._closed = True
        atexit.unregister(self.close)
        self.threads.stop()
        for file in self._files.values():
            file.close(remove=clean and not self._keep)
        if clean and self._keep:
            self.claim.keep()
        self.claim.release(remove=clean and not self._keep)

    @contextmanager
    def noting(self, traffic: Traffic, nbytes: int) -> Iterator[None]:
        """For `DiskFile`: one of its calls is at work, and moves so much if it ends well."""
        if not self.claim.mine:  # a child that the run forked has none of the threads
            raise Stopped
        with self._lock:
            traffic.note(1)
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._lock:
                traffic.nbytes += moved
                traffic.note(-1)

    def __enter__(self) -> DiskFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _threads(threads: int, block_nbytes: int, sums: bool) -> NativeDisk | StandInDisk:
    try:
        made = load_disk(threads, block_nbytes, sums=sums)
    except OSError as error:
        raise RunFailed(f"{error}: raise the limit on processes, or the memory that this one may map") from None
    if made is None:
        log.warning(
            "Blocks on disk are summed in numpy, at about %.1f GB/s, since there is no native library: "
            "`python -m slideformer.native.build` makes it where there is a C++ compiler",
            STAND_IN_GBPS,
        )
        return StandInDisk(threads=threads, block_nbytes=block_nbytes, sums=sums)
    return made


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
            folder.claim.note(name)
            self._file = open_file(self.path, direct=folder.direct)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be made: {error.strerror}: choose another offload_dir") from None
        self._identity = identity(self._file)
        self._on_device: GdsFile | None = None
        try:
            folder.claim.note(name, self._identity[1])
            if self.nbytes:
                os.posix_fallocate(self._file, 0, self.nbytes)
        except OSError as error:
            self.close(remove=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._does_not_fit(free) from None
            raise BadInput(f"{self.path} cannot be made: {error.strerror}: choose another offload_dir") from None
        if folder.gds is not None:
            try:
                self._on_device = folder.gds.file(self.path)
            except BadInput:
                self.close(remove=True)
                raise

    def _does_not_fit(self, free: int) -> DoesNotFit:
        return no_room(self.path, self.nbytes, free)

    def write(self, extent: int, source: torch.Tensor) -> None:
        """Replace the data of an extent. source: 1-D, any dtype, host, no longer than the extent; must not change
        meanwhile. Straight from memory if it starts on a page. After a failure the extent cannot be read.

        Raises DiskFault.
        """
        place, data = self._extents[extent], self._bytes_of(source)
        if data.numel() > place.nbytes:
            raise ValueError(f"{data.numel()} bytes for extent {extent} of {self.name}, which has {place.nbytes}")
        place.generation += 1
        place.length = -1
        head = bytearray(self._header(extent, data.numel()))
        with self._told(extent, "written"), self._folder.noting(self._folder.writes, data.numel()):
            if data.is_cuda:
                data[:1].cpu()  # waits for what makes it on the caller's stream
                with self._through_gds().write(place.offset + PAGE, data):
                    self._folder.threads.write(self._file, place.offset, head, data[:0].cpu())
                    total = device_checksum(data) if self._folder.sums else 0
            else:
                total = heeding_signals(lambda: self._folder.threads.write(self._file, place.offset, head, data))
        place.length, place.checksum = data.numel(), total

    def read(self, extent: int, target: torch.Tensor) -> None:
        """The data of an extent as the last write left it. target: 1-D, any dtype, host, as many bytes as were
        written; after a failure its contents are undefined. Straight into memory if it starts on a page.

        Raises DiskFault: nothing was written, the last write failed, or something else is there now.
        """
        place, data = self._extents[extent], self._bytes_of(target)
        if place.length < 0:
            why = "is being written or could not be" if place.generation else "was never written"
            raise DiskFault(f"extent {extent} of {self.path} {why}: it cannot be read")
        if data.numel() != place.length:
            raise ValueError(f"{data.numel()} bytes for extent {extent} of {self.name}, {place.length} were written")
        expected, wanted, head = self._header(extent, place.length), place.checksum, bytearray(PAGE)
        with self._told(extent, "read"), self._folder.noting(self._folder.reads, data.numel()):
            if data.is_cuda:
                data[:1].cpu()  # what was launched before may use this memory still
                with self._through_gds().read(place.offset + PAGE, data) as moving:
                    self._folder.threads.read(self._file, place.offset, head, data[:0].cpu())
                    total = device_checksum(data, moving.wait) if self._folder.sums else 0
            else:
                total = heeding_signals(lambda: self._folder.threads.read(self._file, place.offset, head, data))
        wrong = difference(bytes(head), expected) or ("its data was changed" if total != wanted else None)
        if wrong is not None:
            raise DiskFault(f"extent {extent} of {self.path} is not what this run wrote: {wrong}")

    def _header(self, extent: int, nbytes: int) -> bytes:
        return header(self._folder.claim.run, self._digest, extent, self._extents[extent].generation, nbytes)

    def close(self, *, remove: bool) -> None:
        """For `DiskFolder`."""
        if remove:
            remove_own(self.path, self._identity)
        if self._on_device is not None:
            self._on_device.close()
        os.close(self._file)

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        here = tensor.device.type == "cpu" or (tensor.is_cuda and self._folder.gds is not None)
        if tensor.dim() != 1 or not tensor.is_contiguous() or not here:
            what = f"a tensor of shape {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{what}: must be 1-D, without gaps, host, or CUDA where the folder has gds")
        return tensor.detach().view(torch.uint8)

    def _through_gds(self) -> GdsFile:
        assert self._on_device is not None, "a tensor of a device was let in without gds"
        return self._on_device

    def _why(self, short: ShortFile) -> str:
        try:
            size = os.fstat(self._file).st_size
        except OSError:  # closed meanwhile
            return str(short)
        return f"the file was cut to {size} of {self.nbytes} bytes" if size < self.nbytes else str(short)

    @contextmanager
    def _told(self, extent: int, done: str) -> Iterator[None]:
        try:
            yield
        except ShortFile as short:
            raise DiskFault(f"extent {extent} of {self.path} could not be {done}: {self._why(short)}") from None
        except Stopped:
            raise DiskFault(f"extent {extent} of {self.path} could not be {done}: the folder was closed") from None
        except OSError as error:
            raise DiskFault(f"extent {extent} of {self.path} could not be {done}: {error.strerror}") from error
