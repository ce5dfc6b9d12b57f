"""The source keeps the rules of docs/architecture.md, and every rule is tried once on a tree that breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

import slideformer
from architecture import violations

SOUND = {
    "__init__.py": "",
    "__main__.py": "from slideformer.cli import main",
    "cli/__init__.py": "from slideformer.cli.app import main",
    "cli/app.py": "def main():\n    from slideformer.engine import step\n    print(step())",
    "engine/__init__.py": "import torch\nfrom slideformer.layout import CUT\nfrom slideformer import schedule",
    "schedule/__init__.py": "from slideformer.schedule.ops import Op",
    "schedule/ops.py": "class Op: pass",
    "layout.py": "CUT = 1",
}

PLANTED = {
    "an import goes up": ("layout.py", "from slideformer.engine import step", "imports engine, which layout may not"),
    "an import goes sideways": ("schedule/ops.py", "import slideformer.memory", "imports memory, which schedule may"),
    "a late import goes up": (
        "layout.py",
        "def f():\n    from slideformer.cli import app",
        "imports cli, which layout",
    ),
    "a relative import goes up": ("layout.py", "from .engine import step", "imports engine, which layout may not"),
    "torch in the schedule": ("schedule/ops.py", "import torch", "schedule/ops.py:1 uses torch"),
    "torch in the layout": ("layout.py", "from torch import Tensor", "layout.py:1 uses torch"),
    "torch.cuda in the engine": (
        "engine/__init__.py",
        "import torch\ndef f(): torch.cuda.empty_cache()",
        ":2 uses torch.c",
    ),
    "torch.cuda imported": ("engine/__init__.py", "from torch import cuda", "engine/__init__.py:1 uses torch.cuda"),
    "triton in the engine": ("engine/__init__.py", "import triton.language as tl", "uses triton"),
    "transformers in the engine": ("engine/__init__.py", "from transformers import AutoModel", "uses transformers"),
    "a thread in the engine": ("engine/__init__.py", "from threading import Thread", "uses threading"),
    "print in the engine": ("engine/__init__.py", "def f():\n    print(1)", "engine/__init__.py:2 prints"),
    "a device call at import": (
        "engine/__init__.py",
        "import torch\nX = torch.zeros(1)",
        "calls torch.zeros at import",
    ),
    "a device call in a default": (
        "engine/__init__.py",
        "import torch\ndef f(x=torch.ones(1)): pass",
        "torch.ones at im",
    ),
    "a device call in a class": (
        "engine/__init__.py",
        "import torch\nclass A:\n    d = torch.device(0)",
        "torch.device at",
    ),
    "a file read at import": (
        "engine/__init__.py",
        "from pathlib import Path\nX = Path('a').read_text()",
        "read_text at",
    ),
    "a file opened at import": ("layout.py", "X = open('a')", "calls open at import"),
    "the environment at import": ("layout.py", "import os\nX = os.environ['A']", "calls os.environ at import"),
    "the environment asked at import": ("layout.py", "import os\nX = os.getenv('A')", "calls os.getenv at import"),
    "a thread at import": ("layout.py", "from x import Thread\nT = Thread()", "calls Thread at import"),
    "a module nobody reaches": ("engine/lost.py", "", "engine/lost.py is not reachable from cli"),
    "a destructor": ("layout.py", "class A:\n    def __del__(self): pass", "layout.py:2 defines __del__"),
    "a global statement": ("layout.py", "def f():\n    global X", "layout.py:2 has a global statement"),
    "a file called utils": ("engine/utils.py", "", "engine/utils.py is called utils"),
    "a folder called common": ("common/a.py", "", "common/a.py is called common"),
    "a class called Manager": ("layout.py", "class SlotManager: pass", "names a class SlotManager"),
    "a class called Info": ("layout.py", "class Info: pass", "names a class Info"),
    "a long file": ("layout.py", "\n" * 401, "layout.py has 401 lines"),
    "a long function": ("layout.py", "def f():\n" + "    x = 1\n" * 60, "layout.py:1 f has 61 lines"),
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for path, source in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return root


def test_the_source_keeps_every_rule():
    assert violations(Path(slideformer.__file__).parent) == []


def test_a_sound_tree_passes(tmp_path: Path):
    assert violations(plant(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("path", "source", "text"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(tmp_path: Path, path: str, source: str, text: str):
    assert any(text in found for found in violations(plant(tmp_path, SOUND | {path: source})))


def test_what_is_allowed_is_not_complained_about(tmp_path: Path):
    """Where a library belongs, a reason for length, and calls that a later call makes."""
    reason = '    """Long because a table is read best in one piece."""\n'
    allowed = SOUND | {
        "cli/app.py": "import slideformer.device.cuda, slideformer.kernels.norm, slideformer.model.hf",
        "device/cuda.py": "import threading, torch\ndef f(): return torch.cuda.Stream()",
        "kernels/norm.py": "import torch, triton\n@triton.jit\ndef kernel(): pass\nE = torch.finfo(torch.float32).eps",
        "model/hf.py": "import transformers\ndef f():\n" + reason + "    x = 1\n" * 60,
        "cli/__init__.py": "from slideformer.cli import app\nimport slideformer.engine",
    }
    assert violations(plant(tmp_path, allowed)) == []
