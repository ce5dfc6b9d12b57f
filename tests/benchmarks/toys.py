"""Settings of runs that take about a second on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts beside the package, not part of it

from cases import Settings  # noqa: E402


def toy(case: str, **changes: object) -> Settings:
    chosen: dict[str, object] = {"batch": 4, "seq": 16, "steps": 2, "warmup": 2, "device": "cpu", "cpu_threads": 1}
    chosen |= {"shape": "tiny", "tile_numel": 4096, "update": "eager" if case.startswith("ours") else None}
    return Settings(case=case, **(chosen | changes))
