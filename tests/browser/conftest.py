"""A real browser opens what is made for one. Where none is installed these tests are not collected; tests/train/
test_report.py reads the same page without one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
collect_ignore_glob = [] if BROWSER else ["test_*.py"]


@pytest.fixture
def document_of(tmp_path: Path) -> Callable[[str], str]:
    """Loads an HTML text in the browser and returns the document as it is after its scripts have run."""

    def load(text: str) -> str:
        page = tmp_path / "page.html"
        page.write_text(text, encoding="utf-8")
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,2300",
                   f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    return load
