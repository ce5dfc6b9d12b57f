"""The folder that a run keeps its state in: made or found empty, locked, and given back as it was.

The lock is a file that names its holder and is locked by the kernel (flock), which lets go however the holder ends. So
a file that nobody holds is what a killed run left behind. Nothing is ever removed that this run did not make itself.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import uuid
from datetime import datetime
from pathlib import Path

from slideformer.errors import BadInput

LOCK_NAME = "slideformer.lock"

log = logging.getLogger(__name__)


class Claim:
    """One run's hold on a folder. run: 16 bytes that no other run has."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput: the folder cannot be made, is in use, or is not empty."""
        self.path, self.run, self._pid = path, uuid.uuid4().bytes, os.getpid()
        self._made = _make(path)
        lock = path / LOCK_NAME
        try:
            if not self._made and (others := _others(path)):
                raise BadInput(others)
            try:
                self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:  # another run was faster
                raise BadInput(_others(path) or f"another run has just used offload_dir {path}: try again") from None
            except OSError as error:
                raise BadInput(f"offload_dir {path} cannot be written to: {error.strerror}: choose another") from None
        except BadInput:
            if self._made:
                _remove_if_empty(path)
            raise
        self._identity = identity(self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # another run may hold it for the moment in which it looks who does
        except OSError:  # some network file systems know no locks: the file itself still keeps others out
            pass
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start": datetime.now().isoformat(timespec="seconds"),
        }
        try:
            os.pwrite(self._lock, json.dumps(holder).encode(), 0)
        except OSError as error:
            self.release(remove=True)
            raise BadInput(f"offload_dir {path} cannot be written to: {error.strerror}: choose another") from None

    @property
    def mine(self) -> bool:
        """False in a child that the run's process forked: the folder is its parent's."""
        return os.getpid() == self._pid

    def release(self, *, remove: bool) -> None:
        """Let go. remove: the lock goes too, and the folder where this run made it and nothing else is in it."""
        if remove:
            remove_own(self.path / LOCK_NAME, self._identity)
        os.close(self._lock)
        if remove and self._made:
            _remove_if_empty(self.path)


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


def _make(path: Path) -> bool:
    """Whether the folder is new. Its parent must be there: a disk that is not mounted is not to be missed."""
    try:
        path.mkdir()
        return True
    except FileExistsError:
        if not path.is_dir():
            raise BadInput(f"offload_dir {path} is a file: choose a folder that is not there yet") from None
        return False
    except FileNotFoundError:
        raise BadInput(
            f"offload_dir {path} cannot be made, there is no folder {path.parent}: mount the disk, make the folder, "
            "or choose another"
        ) from None
    except OSError as error:
        raise BadInput(f"offload_dir {path} cannot be made: {error.strerror}: choose another") from None


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        log.info("%s stays, there is something in it that this run did not write", path)


def _others(path: Path) -> str | None:
    """Whose things are in the folder, in one sentence; None where there are none."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"offload_dir {path} cannot be read: {error.strerror}: choose another"
    if not names:
        return None
    if LOCK_NAME not in names:
        return (
            f"offload_dir {path} has other files in it ({names[0]}{' and more' if names[1:] else ''}): choose a folder "
            "that is not there yet, or an empty one"
        )
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR)
    except OSError as error:
        return f"offload_dir {path} belongs to another run ({error.strerror}): choose another"
    try:
        holder = _holder(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return (
                f"offload_dir {path} is used by a run that is at work ({holder}): wait for its end, or choose another"
            )
        return _leftovers(path, names, holder)
    finally:
        os.close(lock)


OWN_NAMES = frozenset((LOCK_NAME, "weight", "residual", "exp_avg", "exp_avg_sq", "saved", "rates"))
"""What runs leave in such a folder."""


def _holder(lock: int) -> str:
    try:
        told = json.loads(os.pread(lock, 4096, 0))
        return f"process {told['pid']} on {told['host']} since {told['start']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "which one is not known"


def _leftovers(path: Path, names: list[str], holder: str) -> str:
    nbytes, newest = 0, 0.0
    for name in names:
        try:
            status = os.lstat(path / name)
        except OSError:
            continue
        nbytes, newest = nbytes + status.st_blocks * 512, max(newest, status.st_mtime)
    when = datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")
    others = sorted(set(names) - OWN_NAMES)
    what = (
        f"{', '.join(sorted(OWN_NAMES & set(names)))} there, and leave what else is in it" if others else "the folder"
    )
    return (
        f"offload_dir {path} holds {nbytes / 2**30:.2f} GiB of a run that was killed or kept its files ({holder}, last "
        f"written {when}): nothing goes on from them (a checkpoint has its own), remove {what}, or choose another"
    )
