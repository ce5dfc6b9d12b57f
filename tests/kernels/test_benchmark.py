"""benchmarks/kernels.py as it is called, on the CPU and small: lines with all keys, and a table of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
sys.path.append(str(SCRIPT.parent))

from kernel_targets import targets  # noqa: E402

KEYS = "bench run commit date command gpu torch case cpu_threads shape batch seq op impl ms peak_mib steps".split()
IMPLS = {
    "adamw": {"eager", "ours"},
    "squared_norm": {"eager", "ours"},
    "packed": {"rows", "one row", "one row, uneven"},
}


def call(*words: str, script: Path = SCRIPT) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=110, env=environment
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
            assert line["gbps"] == pytest.approx(nbytes / line["ms"]["median"] / 1e6, rel=1e-3)
    table = call("--report", str(out)).splitlines()
    assert len([row for row in table if row.startswith("| tiny |")]) == len(lines)
    judged = [row for row in table if row.startswith(("met ", "MISSED "))]
    assert len(judged) == 3  # bandwidth of the update and the norm, and the time of the packed row


def test_launch_shapes_are_told_fastest_first_with_the_present_one():
    words = "--device cpu --numel 8192 --only rotary,loss --reps 1 --top 1".split()
    told = call(*words, script=SCRIPT.with_name("tune_kernels.py")).splitlines()[1:]
    groups = [row for row in told if not row.startswith(" ")]
    assert groups == [
        "rotary, 24+8 heads, 4 variants", "rotary, 32+8 heads, 4 variants",
        "linear cross entropy, 16 tokens, 64 x 32, 6 variants",
    ]  # fmt: skip
    assert [row.endswith(("NUM_WARPS=2  (now)", "as it is")) for row in told].count(True) == 3
    times = [float(row.split()[0]) for row in told[1:3] if row.startswith(" ")]
    assert times == sorted(times) and all(time > 0 for time in times)


def line(op: str, impl: str, ms: float, peak_mib: float, **more: object) -> dict[str, object]:
    times = dict.fromkeys(("min", "median", "max"), ms)
    return {"shape": "s", "op": op, "detail": "d", "impl": impl, "ms": times, "peak_mib": peak_mib} | more


def test_targets_are_judged():
    lines = [
        line("rms_norm", "liger", 1.0, 100.0, gbps=1, of_limit=0.5),
        line("rms_norm", "ours", 1.03, 101.0, gbps=1, of_limit=0.79),
        line("rotary", "liger", 1.0, 0.0, gbps=1, of_limit=0.9),
        line("rotary", "ours", 1.02, 0.1, gbps=1, of_limit=0.9),
        line("linear_cross_entropy", "liger", 1.0, 100.0, tflops=1, of_limit=1.01),
        line("linear_cross_entropy", "ours", 0.5, 50.0, tflops=1, of_limit=0.2),
        line("linear_cross_entropy", "ours sliced", 9.0, 100.1, tflops=1, of_limit=0.1),
        line("block", "compile", 1.0, 1.0, off_by=0.026),
        line("packed", "rows", 1.0, 100.0),
        line("packed", "one row", 1.1, 111.0),
    ]
    found = list(targets(lines))
    names = [str(target).removeprefix("MISSED").removeprefix("met").split(":")[0] for target in found]
    assert [name.split("), ")[1] for name in names] == [
        *("time over Liger's", "memory over Liger's", "share of the copy's bandwidth"),
        *("time over Liger's", "memory over Liger's, which is none", "share of the copy's bandwidth"),
        *("time over Liger's", "memory over Liger's", "by slices, memory over Liger's"),
        *(f"{impl}, share of the product's rate" for impl in ("liger", "ours", "ours sliced")),
        "compile, gradients off the model's own by",
        *("one row, time over rows", "one row, memory over rows"),
    ]
    met = [target.met for target in found]
    assert met == [False, False, False, True, False, True, True, True, False, False, True, True, False, True, False]
