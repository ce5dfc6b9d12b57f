"""benchmarks/kernels.py as it is called, on the CPU and small: lines with all keys, and a table of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
KEYS = "bench run commit date command gpu torch case cpu_threads shape batch seq op impl ms peak_mib steps".split()
IMPLS = {
    "adamw": {"eager", "ours"},
    "squared_norm": {"eager", "ours"},
    "packed": {"rows", "one row", "one row, uneven"},
}


def call(*words: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_implementation_has_a_line_and_a_row(tmp_path):
    out = tmp_path / "kernels.jsonl"
    small = "--device cpu --shapes tiny --batch 2 --seq 2 --reps 1".split()
    call(*small, "--only", ",".join(IMPLS), "--out", str(out))
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    found = {op: {line["impl"] for line in lines if line["op"] == op} for op in IMPLS}
    assert found == IMPLS and len({line["run"] for line in lines}) == 1
    for line in lines:
        assert not set(KEYS) - line.keys()
        assert 0 < line["ms"]["min"] <= line["ms"]["median"] <= line["ms"]["max"]
        if line["op"] != "packed":
            nbytes = {"adamw": 26, "squared_norm": 2}[line["op"]] * int(line["detail"].split()[0])
            assert abs(line["gbps"] - nbytes / line["ms"]["median"] / 1e6) <= 0.06
    table = call("--report", str(out)).splitlines()
    assert len([row for row in table if row.startswith("| tiny |")]) == len(lines)
