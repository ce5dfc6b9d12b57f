"""What is in a folder that a run is to keep its state in: somebody's files, a run at work, or what a killed one left.

A claim is a file that names its run and every file that this makes, and is locked by the kernel (flock), which lets go
however the run ends. So a claim that nobody holds is what a killed run left behind, and it says what of the folder may
be removed: those files, by name and inode, and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from slideformer.errors import BadInput

LOCK_NAME = "slideformer.lock"

OWN_NAMES = frozenset((LOCK_NAME, "weight", "residual", "exp_avg", "exp_avg_sq", "saved", "rates"))
"""What runs leave in such a folder; for a claim that cannot be read."""

AGAIN_S, TRIES = 0.1, 10


class Whose(Enum):
    OTHERS = auto()  # files of who knows whom
    AT_WORK = auto()  # a run's that holds its claim
    LEFT = auto()  # a run's that has ended


class Found(NamedTuple):
    """sentence: why another run cannot have the folder, and what to do. nbytes: on the disk, of the claim's files.
    goes: with reuse_offload_dir a run removes it."""

    whose: Whose
    sentence: str
    nbytes: int = 0
    goes: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim says. made: its run made the folder. kept: the files are to stay. files: names, and inodes of those
    that are there for certain; None: nothing is said that another run could go by."""

    holder: str
    made: bool = False
    kept: bool = False
    files: Mapping[str, int | None] | None = None


def found_in(path: Path) -> Found | None:
    """What is in the folder; None where it is empty."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return Found(Whose.OTHERS, f"offload_dir {path} cannot be read: {error.strerror}: choose another")
    if not names:
        return None
    if LOCK_NAME not in names:
        others = (
            f"offload_dir {path} has other files in it ({listed(names)}): choose a folder that is not there yet, or an "
            "empty one"
        )
        return Found(Whose.OTHERS, others)
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        sentence = f"offload_dir {path} belongs to another run ({error.strerror}): choose another"
        return Found(Whose.AT_WORK, sentence)
    try:
        claimed = read_claim(lock)
        if _locks(lock):
            return _left(path, names, claimed)
        sentence = f"offload_dir {path} is used by a run that is at work ({claimed.holder}): wait for its end, or "
        return Found(Whose.AT_WORK, sentence + "choose another", _nbytes_of(path, claimed.files or OWN_NAMES))
    finally:
        os.close(lock)


def wait_for_the_end(path: Path, *, wait_s: float) -> None:
    """Of a run that is at work in the folder, so long at most."""
    end_s = time.monotonic() + wait_s
    while path.is_dir() and time.monotonic() < end_s:
        found = found_in(path)
        if found is None or found.whose is not Whose.AT_WORK:
            return
        time.sleep(AGAIN_S)


def take_over(path: Path) -> tuple[int, Claimed]:
    """Remove the files that a killed run's claim lists, and hold the claim: its open file, and what it said.

    Raises BadInput. Nothing has been removed then if another run holds the claim, if it says too little, if the files
    were kept on purpose, or if there is something that it does not list.
    """
    lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not hold(path, lock):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        names, claimed = sorted(os.listdir(path)), read_claim(lock)
        if claimed.files is None or claimed.kept or _not_the_runs(path, names, claimed):
            raise BadInput(_left(path, names, claimed).sentence)
        for name in names:
            if name != LOCK_NAME:
                (path / name).unlink()
    except OSError as error:
        os.close(lock)
        raise BadInput(f"offload_dir {path} cannot be taken over: {error.strerror}: choose another") from None
    except BaseException:
        os.close(lock)
        raise
    return lock, claimed


def hold(path: Path, lock: int) -> bool:
    """Lock the folder's claim, which is open as `lock`; False where the file system knows no locks.

    Raises BadInput where another run holds it, or has given the folder back: then this file is no longer the claim.
    """
    for _ in range(TRIES):  # who looks into the folder holds it for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            time.sleep(AGAIN_S)
            continue
        except OSError:
            locked = False
        try:
            if os.path.samestat(os.fstat(lock), os.lstat(path / LOCK_NAME)):
                return locked
        except OSError:
            pass
        break
    raise just_taken(path)


def just_taken(path: Path) -> BadInput:
    return BadInput(f"another run has just taken offload_dir {path}: choose another")


def read_claim(lock: int) -> Claimed:
    if os.fstat(lock).st_size == 0:  # its run was killed before it could make anything
        return Claimed("which one is not known", files={})
    try:
        told = json.loads(os.pread(lock, 1 << 16, 0))
        holder = f"process {told['pid']} on {told['host']} since {told['start']}"
    except (ValueError, KeyError, TypeError, OSError):
        return Claimed("which one is not known")
    files = told.get("files")
    by_inode = isinstance(files, dict) and told.get("locked") is True
    return Claimed(holder, told.get("made") is True, told.get("kept") is True, files if by_inode else None)


def _locks(lock: int) -> bool:
    """Whether the claim's lock could be had, as it now is until the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _is(file: Path, inode: int | None) -> bool:
    """None: a file of the name that its run was about to make."""
    try:
        found = os.lstat(file)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and inode in (None, found.st_ino)


def _nbytes_of(path: Path, names: Iterable[str]) -> int:
    nbytes = 0
    for name in names:
        try:
            nbytes += os.lstat(path / name).st_blocks * 512
        except OSError:
            continue
    return nbytes


def _not_the_runs(path: Path, names: list[str], claimed: Claimed) -> list[str]:
    """Of a claim that says nothing of files, those are its run's that have the names of any run's."""
    if claimed.files is None:
        return [name for name in names if name not in OWN_NAMES]
    files = claimed.files
    return [n for n in names if n != LOCK_NAME and not (n in files and _is(path / n, files[n]))]


def listed(names: list[str]) -> str:
    """The first of them."""
    return names[0] + (" and more" if names[1:] else "")


def _left(path: Path, names: list[str], claimed: Claimed) -> Found:
    newest = 0.0
    for name in names:
        try:
            newest = max(newest, os.lstat(path / name).st_mtime)
        except OSError:
            continue
    when = datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")
    others = _not_the_runs(path, names, claimed)
    own = [name for name in names if name not in others]
    folder, nbytes = path.absolute(), _nbytes_of(path, own)
    command, beside, is_told = ["rm", "-r", str(folder)], "", claimed.files is not None and not claimed.kept
    if others:  # which are to stay
        command, is_told = ["rm", *(str(folder / name) for name in own)], False
        beside = f", and what is not that run's ({listed(others)}), so that reuse_offload_dir would remove nothing"
    instead = "set reuse_offload_dir: true, " if is_told else "move the rest, " if others else ""
    whose = "of a run that kept its files" if claimed.kept else "of a run that was killed"
    sentence = (
        f"offload_dir {path} holds {nbytes / 2**30:.2f} GiB {whose} ({claimed.holder}, last written {when}){beside}: "
        f"nothing goes on from the run's files (a checkpoint has its own): remove them with `{shlex.join(command)}`, "
        f"{instead}or choose another"
    )
    return Found(Whose.LEFT, sentence, nbytes, is_told)
