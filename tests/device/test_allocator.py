"""What torch's allocator is asked for when a GPU is opened, and that a user's own word about it stands."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from slideformer.device import cuda
asked = []
torch._C._accelerator_setAllocatorSettings = asked.append
if sys.argv[1] == "cannot be asked" and hasattr(torch._C, "_accelerator_getAllocatorSettings"):
    del torch._C._accelerator_getAllocatorSettings
cuda._let_segments_grow()
print(asked)
"""


@pytest.mark.parametrize("torch_settings", ["can be asked", "cannot be asked"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ["expandable_segments:True"]),
        ("max_split_size_mb:128", ["max_split_size_mb:128,expandable_segments:True"]),
        ("expandable_segments:False", []),
    ],
)
def test_segments_grow_unless_the_user_has_said_otherwise(given, expected, torch_settings, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    command = [sys.executable, "-c", PROGRAM, torch_settings]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == str(expected)
