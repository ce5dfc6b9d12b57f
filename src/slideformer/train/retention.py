"""The checkpoints of a run side by side: which stay, leftovers, and whether there is room."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from slideformer.config import TrainConfig
from slideformer.errors import DoesNotFit
from slideformer.layout import Layout
from slideformer.memory import size
from slideformer.memory.state import state_nbytes
from slideformer.train import checkpoint
from slideformer.train.checkpoint import is_complete

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(checkpoint-\d+)\.(partial|removed|old)")


def clean(parent: Path) -> None:
    """Remove what a run that was killed left of a checkpoint it was writing, replacing or removing."""
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        if match[2] == "old" and not (parent / match[1]).exists():
            path.rename(parent / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def numbered(parent: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all that are called checkpoint-STEP, complete or not, newest first."""
    found = [(m, path) for path in (parent.iterdir() if parent.is_dir() else []) if (m := _NAME.fullmatch(path.name))]
    return sorted(((int(m[1]), path) for m, path in found if path.is_dir()), reverse=True)


def rotate(parent: Path, newest: int, limit: int | None, *, best: int | None = None) -> None:
    """Keep `limit` complete checkpoints up to that of step `newest`, which has just been written: it, that of step
    `best`, even if they are then one more than `limit`, and the newest of the others.

    Those of later steps, which a run started again from an earlier one finds, stay until they are written anew.
    """
    done = [(step, path) for step, path in numbered(parent) if step <= newest and is_complete(path)]
    others = [path for step, path in done if step not in (newest, best)]
    room = None if limit is None else max(limit - (len(done) - len(others)), 0)
    for path in others[room:] if room is not None else []:
        going = parent / f".{path.name}.removed"  # in one go, so that no half of one is ever seen
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def require_space_for_result(config: TrainConfig, model_nbytes: int) -> None:
    """Raise DoesNotFit if the disk has no room for it beside what is there."""
    parent = Path(config.output_dir)
    free = shutil.disk_usage(parent).free
    if model_nbytes > free:
        raise DoesNotFit(
            f"the model takes {size(model_nbytes)} in {parent}, and {size(free)} are free: make room, or choose "
            "another output_dir"
        )


def require_space(
    config: TrainConfig, layout: Layout, *, keep_residual: bool, model_nbytes: int, num_saves: int
) -> None:
    """Raise DoesNotFit if the disk has no room for the checkpoints still to come and the result."""
    parent = Path(config.output_dir)
    have = sum(is_complete(path) for _, path in numbered(parent))
    one = checkpoint.nbytes_of(layout, sum(state_nbytes(layout, keep_residual=keep_residual).values()))
    limit = config.save_total_limit
    if limit == 1 and config.load_best_model_at_end:
        limit = 2  # the newest, and the best
    most = have + num_saves if limit is None else min(have + num_saves, limit + 1)
    new = max(most - have, 1)
    need, free = new * one + model_nbytes, shutil.disk_usage(parent).free
    if need > free:
        raise DoesNotFit(
            f"the checkpoints need {size(need)} in {parent} ({new} of {size(one)} at a time, and the result of "
            f"{size(model_nbytes)}), and {size(free)} are free: make room, lower save_total_limit, choose another "
            "output_dir, or set save_strategy: no"
        )
