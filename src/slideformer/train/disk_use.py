"""What a run moves between disk and host: its metrics, and the limit that max_disk_writes sets."""

from __future__ import annotations

import time

from slideformer.engine import Engine
from slideformer.memory import size

STEPS_AT_WORK = 2
"""Steps that may be submitted and not done: their writes are still to come."""


class DiskUse:
    def __init__(self, engine: Engine, max_writes: int | None) -> None:
        self._engine, self._max_writes = engine, max_writes
        self._seen, self._since = engine.disk_traffic, time.perf_counter()

    def metrics(self) -> dict[str, float]:
        """GB/s since the last call; nothing where nothing is on disk."""
        if self._engine.folder is None:
            return {}
        now, at = self._engine.disk_traffic, time.perf_counter()
        read, written = ((b - a) / (at - self._since) / 1e9 for a, b in zip(self._seen, now, strict=True))
        self._seen, self._since = now, at
        return {"nvme_read_gbps": read, "nvme_write_gbps": written}

    @property
    def is_spent(self) -> bool:
        """The steps that would be at work next could write more than there may be written."""
        to_come = STEPS_AT_WORK * self._engine.disk_writes_per_step
        return self._max_writes is not None and self._engine.disk_traffic[1] + to_come > self._max_writes

    def sentence(self) -> str:
        return (
            f"{size(self._engine.disk_traffic[1])} were written to offload_dir, and further steps would pass "
            f"max_disk_writes ({size(self._max_writes or 0)})"
        )
