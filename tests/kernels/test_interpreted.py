"""The Triton kernels run on the CPU, through Triton's interpreter: the tests in `interpreted/`.

In processes of their own because the interpreter is chosen when a kernel's module is imported; a few, because each
imports torch anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
GROUPS = {
    "state": ("adamw", "squared_norm"),
    "loss": ("softmax_gradient",),
    "blocks": ("rms_norm", "rotary", "glu", "families"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS)
def test_through_the_interpreter(group: str):
    files = [str(FOLDER / f"{name}.py") for name in GROUPS[group]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_file_is_in_one_group():
    named = sorted(name for names in GROUPS.values() for name in names)
    assert named == sorted(file.stem for file in FOLDER.glob("*.py"))
