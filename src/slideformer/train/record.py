"""run.json: what was run, with what, on what, and how it ended. Written at the start and again at the end.

No secrets: what looks like a token, or is the value of a variable that holds one, is written as ***.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slideformer import __version__
from slideformer.config import TrainConfig
from slideformer.errors import RunFailed
from slideformer.model import files
from slideformer.train.redact import redacted

log = logging.getLogger(__name__)
FILE = "run.json"
DISK_WRITES = "disk_writes"  # bytes to the disk tier, of all starts of the run
FINISHED = "finished"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(slots=True)
class RunRecord:
    """One run.json. status: running, finished, stopped or failed."""

    folder: Path
    config: TrainConfig
    facts: dict[str, object] = field(default_factory=dict)
    started: str = field(default_factory=lambda: _now())

    def write(self, status: str, **facts: object) -> None:
        """Write the whole file anew, with these facts added to the earlier ones. Raises RunFailed."""
        self.facts |= facts
        content = {
            "status": status,
            "started": self.started,
            "written": _now(),
            "versions": versions(),
            "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
            **self.facts,
            "config": self.config.model_dump(mode="json"),
        }
        try:
            files.replace_text(self.folder / FILE, json.dumps(redacted(content), indent=2) + "\n")
        except OSError as error:
            raise RunFailed(
                f"{self.folder / FILE} could not be written: {error.strerror}: make room, or choose another output_dir"
            ) from error

    def end(self, status: str, **facts: object) -> None:
        """The same for a run that has ended: how it did comes first, so a disk that refuses is told of in the log."""
        try:
            self.write(status, **facts)
        except RunFailed as failure:
            log.warning("%s", failure)


def versions() -> Mapping[str, str]:
    """Of this package, Python, and what the numbers depend on."""
    found = {"slideformer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
