"""What a run would find at its offload_dir, without making anything there: for whoever plans one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slideformer.memory.disk import free_nbytes
from slideformer.memory.disk_claim import is_a_file, no_parent
from slideformer.memory.disk_direct import would_pass_the_cache
from slideformer.memory.disk_found import Whose, found_in


@dataclass(frozen=True, slots=True)
class DiskLook:
    """here: the folder, or the one that it would be made in. nbytes: free, with what goes before a run takes any.
    direct: past the page cache; None where that could not be tried. refusal: why a run would not begin now. is_guess:
    there is none yet, and what it would be made in is the root: what is mounted there elsewhere is not here."""

    path: Path
    here: bool
    nbytes: int = 0
    direct: bool | None = None
    refusal: str | None = None
    is_guess: bool = False


def look_at(path: Path, *, reuse: bool) -> DiskLook:
    """reuse: see `DiskFolder`. Writes a file without a name for a moment."""
    if path.exists() and not path.is_dir():
        return DiskLook(path, here=True, refusal=is_a_file(path))
    home = path if path.is_dir() else path.parent
    if not home.is_dir():
        return DiskLook(path, here=False, refusal=no_parent(path))
    found = found_in(path) if home == path else None
    nbytes = free_nbytes(home) + (0 if found is None or found.whose is Whose.OTHERS else found.nbytes)
    refusal = None if found is None or (reuse and found.goes) else found.sentence
    direct = None
    try:
        direct = would_pass_the_cache(home)
    except OSError as error:
        refusal = refusal or f"offload_dir {path} cannot be made: {error.strerror}: choose another"
    whole = path.absolute()
    is_guess = home != path and whole.parent == Path(whole.anchor)
    return DiskLook(path, here=True, nbytes=nbytes, direct=direct, refusal=refusal, is_guess=is_guess)
