"""Encoded datasets on disk, named by a digest of everything that decides what they are.

An entry is written under a name of its own, flushed, and renamed into place, so it is whole or not there; of two
processes that write the same one, one wins and both are served. Entries that were not used for longest go first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slideformer.data.samples import Samples, SampleWriter, map_samples
from slideformer.errors import BadInput

FACTS = "facts.json"  # written last
PARTIAL = ".partial-"
MAX_NBYTES = 50 * 2**30
ABANDONED_AFTER_S = 86_400.0

Facts = dict[str, object]
Fill = Callable[[SampleWriter], Facts]
"""Writes samples, and returns what else is to be remembered with them, as JSON; `files` names the files of the rows."""


def digest(facts: Mapping[str, object]) -> str:
    """The name of an entry."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def folder_of(setting: str | None) -> Path | None:
    """Of dataset_cache_dir. None: nothing is kept."""
    if setting != "auto":
        return None if setting is None else Path(setting)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "slideformer"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def cached(folder: Path | None, name: str | None, fill: Fill) -> tuple[Samples, Facts]:
    """The samples and facts of an entry, made by `fill` if there is none.

    folder or name None: they are made anew, in a folder that is gone afterwards. Raises BadInput where nothing can be
    written, and what `fill` raises.
    """
    final = None if folder is None or name is None else folder / name
    if final is not None and (found := _found(final)):
        return found
    partial = None if final is None else _new_folder(final.parent)
    if partial is None:
        final, partial = None, Path(tempfile.mkdtemp(prefix="slideformer-"))
    try:
        with SampleWriter(partial) as writer:
            facts = fill(writer)
            writer.close()
        _write_facts(partial / FACTS, facts)
        samples = map_samples(partial, facts["files"])
        if final is not None:
            _into_place(partial, final)
            _make_room(final.parent, final)
    except OSError as error:
        raise BadInput(
            f"encoded rows cannot be written to {partial.parent}: {error.strerror}: set dataset_cache_dir to a folder "
            "with more room"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what is mapped stays; once in place there is nothing left here
    return samples, facts


def _found(final: Path) -> tuple[Samples, Facts] | None:
    """An entry, if it is there and whole."""
    if not final.is_dir():
        return None
    try:
        facts = json.loads((final / FACTS).read_text(encoding="utf-8"))
        samples = map_samples(final, facts["files"])
        os.utime(final)
        return samples, facts
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.getLogger(__name__).warning("the encoded rows in %s cannot be read (%s): made anew", final, error)
        shutil.rmtree(final, ignore_errors=True)
        return None


def _new_folder(parent: Path) -> Path | None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
    except OSError as error:
        logging.getLogger(__name__).warning(
            "encoded rows are not kept: %s cannot be written to (%s); set dataset_cache_dir", parent, error.strerror
        )
        return None


def _write_facts(path: Path, facts: Facts) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())


def _into_place(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:  # another process was faster, or the folder could not be made
        if partial.parent == final.parent and not final.is_dir():
            raise


def _make_room(folder: Path, newest: Path) -> None:
    """Remove what was used longest ago until the rest is small enough, and what killed processes left."""
    entries = []
    for path in folder.iterdir():
        try:
            used, nbytes = path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir())
        except OSError:  # another process removes it
            continue
        if path.name.startswith(PARTIAL):
            if time.time() - used > ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
        elif (path / FACTS).is_file():
            entries.append((used, nbytes, path))
    total = sum(nbytes for _, nbytes, _ in entries)
    for _, nbytes, path in sorted(entries):
        if total > MAX_NBYTES and path != newest:
            shutil.rmtree(path, ignore_errors=True)
            total -= nbytes
