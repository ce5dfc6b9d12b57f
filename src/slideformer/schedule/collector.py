"""Python's cyclic collector, put off while programs are built.

A program of a large model is millions of small objects that stay and are in no cycle. The collector walks through all
of them again and again as they become more: half of the time that the plan of a 123B model takes (2026-11-30).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_put_off() -> Iterator[None]:
    """Nothing is looked through for cycles inside. For the start of a run, not for its steps."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
