"""The folder that a run writes to: made, tried, and locked, so that one process at a time has it.

Two runs in one folder would mix their checkpoints and remove each other's. The folder itself is locked (flock):
nothing is left behind, and the kernel lets go when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slideformer.errors import BadInput


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make `folder` where it is not there, and hold it. If it is empty in the end, what was made is gone again.

    Raises BadInput: it cannot be made or written to, or another process holds it. Where a file system knows no such
    locks (some network ones) none is held.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"output_dir {folder} cannot be made: {error.strerror}: choose another") from None
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"output_dir {folder} cannot be written to: {error.strerror}: choose another") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another process is writing to {folder}: wait until it has ended, or choose another output_dir"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()
