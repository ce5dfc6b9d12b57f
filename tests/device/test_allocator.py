"""What torch's allocator is asked for when a GPU is opened, and that a user's own word about it stands."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from slideformer.device.cuda import _let_segments_grow
_let_segments_grow()
_let_segments_grow()
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_segments_grow_unless_the_user_has_said_otherwise(given, expected, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == expected
