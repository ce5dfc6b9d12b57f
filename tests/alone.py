"""Work in a process of its own, for what is measured of a whole process: other tests' leftovers move too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

TIMEOUT_S = 110


def alone(function: Callable[..., tuple[int, ...]], *words: str) -> tuple[int, ...]:
    """What `function(*words)` of a module gives in a new process. words: text."""
    call = f"from {function.__module__} import {function.__name__} as f; print(*f(*{list(words)!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    assert done.returncode == 0, done.stderr
    return tuple(int(word) for word in done.stdout.splitlines()[-1].split())
