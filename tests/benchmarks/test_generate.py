"""benchmarks/generate.py as it is called, on the CPU: its lines add up."""

from __future__ import annotations

import json
import sys

import pytest

import generate
from report import report, sift


def test_generation_is_measured_against_the_link(monkeypatch, tmp_path):
    words = "--shape tiny --prompts 1 3 --new-tokens 5 --prompt-length 6 --device cpu --cpu-threads 1 --link-gib 0.002"
    out = tmp_path / "g.jsonl"
    monkeypatch.setattr(sys, "argv", [generate.__file__, *words.split(), "--out", str(out)])
    generate.main()
    one, three = lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert sift(lines)[1] == [] and report(out) == 0
    assert (one["batch"], three["batch"], one["case"]) == (1, 3, "ours-stream")
    assert one["params"] > one["params_streamed"] > 0.7 * one["params"]  # all but the tied table and the final norm
    for line in (one, three):
        assert line["steps"] == 2
        ideal = line["batch"] * line["link_gbps"] * 1e9 / (4 * line["params"])  # fp32 on a CPU
        assert line["tokens_per_second"] / line["batch"] == pytest.approx(1 / line["step_s"]["median"], rel=0.01)
        assert line["ratio"] == pytest.approx(line["tokens_per_second"] / ideal, rel=0.01, abs=0.001)
