"""How many blocks are on the device at a time, where nobody says.

Two: one arrives while the other computes. One where two have no room: uploads and the model then wait for each other. A
third is never chosen: in 36 placements by the clock it made a step at most 1.3% shorter (1B, 3B and 8B shapes, 4 and 16
x 1024, 4 to 8 GiB, rates of an H200 and of a card with 60 TFLOP/s and 12 GB/s each way; 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slideformer.engine.options import WINDOW, EngineOptions

WINDOWS = (WINDOW, 1)
"""Tried in turn."""


def with_window(
    options: EngineOptions, decided: Callable[[EngineOptions], EngineOptions], fits: Callable[[EngineOptions], bool]
) -> EngineOptions:
    """What `decided` makes of the options with the first window that fits then, or with the smallest; a window that was
    given is the only one."""
    windows = WINDOWS if options.window == "auto" else (options.window,)
    for window in windows:
        found = decided(replace(options, window=window))
        if fits(found):
            break
    return found
