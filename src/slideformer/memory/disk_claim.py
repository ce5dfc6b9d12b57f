"""The folder that a run keeps its state in: made or found empty, locked, and given back as it was.

Nothing is ever removed that this run did not make itself, but for what a killed run's claim lists (disk_found.py), and
that only where the config allows it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from slideformer.errors import BadInput
from slideformer.memory.disk_direct import PROBE_NAME
from slideformer.memory.disk_found import LOCK_NAME, Whose, found_in, hold, just_taken, take_over, wait_for_the_end

WAIT_S = 30.0
"""How long the end of a run is waited for before what it leaves is taken over: the kernel takes seconds to give back a
large process's memory, and lets go of its files after that."""

log = logging.getLogger(__name__)


class Claim:
    """One run's hold on a folder. run: 16 bytes that no other run has."""

    def __init__(self, path: Path, *, reuse: bool = False) -> None:
        """reuse: what a killed run left there may go. Raises BadInput: the folder cannot be made, is in use, or is not
        empty."""
        self.path, self.run, self._pid = path, uuid.uuid4().bytes, os.getpid()
        if reuse:
            wait_for_the_end(path, wait_s=WAIT_S)
        self._made, locked = make(path), True
        try:
            found = None if self._made else found_in(path)
            if found is not None and reuse and found.whose is Whose.LEFT:
                self._lock, before = take_over(path)
                self._made = before.made
                log.warning(
                    "offload_dir %s is taken over: %.2f GiB that a killed run (%s) had left there are removed",
                    path,
                    found.nbytes / 2**30,
                    before.holder,
                )
            elif found is not None:
                raise BadInput(found.sentence)
            else:
                self._lock, locked = _new_lock(path)
        except BadInput:
            if self._made:
                _remove_if_empty(path)
            raise
        self._identity = identity(self._lock)
        self._files: dict[str, int | None] = {PROBE_NAME: None}
        self._told: dict[str, object] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start": datetime.now().isoformat(timespec="seconds"),
            "locked": locked,
            "made": self._made,
        }
        try:
            self._write()
        except OSError as error:
            self.release(remove=True)
            raise BadInput(f"offload_dir {path} cannot be written to: {error.strerror}: choose another") from None

    @property
    def mine(self) -> bool:
        """False in a child that the run's process forked: the folder is its parent's."""
        return os.getpid() == self._pid

    def note(self, name: str, inode: int | None = None) -> None:
        """There is a file of this name from now on, or will be. Raises OSError."""
        self._files[name] = inode
        self._write()

    def forget(self, name: str) -> None:
        """The file is gone. Raises OSError."""
        del self._files[name]
        self._write()

    def keep(self) -> None:
        """The files stay on purpose: no other run is to take them over."""
        self._told["kept"] = True
        with suppress(OSError):
            self._write()

    def release(self, *, remove: bool) -> None:
        """Let go. remove: the lock goes too, and the folder where this run made it and nothing else is in it."""
        if remove:
            remove_own(self.path / LOCK_NAME, self._identity)
        os.close(self._lock)
        if remove and self._made:
            _remove_if_empty(self.path)

    def _write(self) -> None:
        """In one piece, and on the disk: a machine that stops leaves it too."""
        text = json.dumps({**self._told, "files": self._files}).encode()
        os.pwrite(self._lock, text.ljust(os.fstat(self._lock).st_size), 0)
        os.fsync(self._lock)


def identity(descriptor: int) -> tuple[int, int]:
    """What tells an open file from another one that took its name."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def remove_own(file: Path, made: tuple[int, int]) -> None:
    """Remove a file that this run made; one that is gone, or that somebody put in its place, is left alone."""
    try:
        status = os.lstat(file)
        if (status.st_dev, status.st_ino) == made:
            file.unlink()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s could not be removed: %s", file, error.strerror)


def make(path: Path) -> bool:
    """Whether the folder is new. Its parent must be there: a disk that is not mounted is not to be missed. Raises
    BadInput."""
    try:
        path.mkdir()
        return True
    except FileExistsError:
        if not path.is_dir():
            raise BadInput(is_a_file(path)) from None
        return False
    except OSError as error:
        if not path.parent.is_dir():
            raise BadInput(no_parent(path)) from None
        raise BadInput(f"offload_dir {path} cannot be made: {error.strerror}: choose another") from None


def is_a_file(path: Path) -> str:
    return f"offload_dir {path} is a file: choose a folder that is not there yet"


def no_parent(path: Path) -> str:
    return (
        f"offload_dir {path} cannot be made, there is no folder {path.parent}: mount the disk, make the folder, "
        "or choose another"
    )


def _new_lock(path: Path) -> tuple[int, bool]:
    """The claim's file, open, and whether it is locked: some network file systems know no locks, and there the file
    itself keeps others out. Until then it looks like one that a killed run left, and another run may take it."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:  # another run was faster
        found = found_in(path)
        raise BadInput(
            found.sentence if found else f"another run has just used offload_dir {path}: try again"
        ) from None
    except OSError as error:
        raise BadInput(f"offload_dir {path} cannot be written to: {error.strerror}: choose another") from None
    try:
        locked = hold(path, lock)
        if os.fstat(lock).st_size > 0:
            raise just_taken(path)
    except BadInput:
        os.close(lock)
        raise
    return lock, locked


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        log.info("%s stays, there is something in it that this run did not write", path)
