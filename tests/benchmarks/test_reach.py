"""The search for the largest size, and how a case that does not fit ends."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import cases
import reach
import step
from reach import largest
from report import sift
from slideformer.device import LaneFailure


def refused(monkeypatch, when) -> None:
    """A device that has no room for some settings."""
    measure = cases.measure

    def measured(one):
        if when(one):
            raise torch.OutOfMemoryError("out of memory")
        return measure(one)

    monkeypatch.setattr(cases, "measure", measured)


@pytest.mark.parametrize("most", [1, 2, 3, 37, 63, 64, 100])
def test_the_largest_that_fits_is_found(most):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    assert largest(fits, 1, 50) == min(most, 50)
    assert len(tried) <= 14 and max(tried) <= 50


def test_of_large_sizes_it_is_found_to_one_part_in_64():
    found = largest(lambda size: size <= 1000, 1, 4096)
    assert 1000 - 1000 // 64 <= found <= 1000


def test_nothing_fits():
    assert largest(lambda size: False, 8, 64) == 0


def test_a_case_that_does_not_fit_ends_with_3_and_its_reason(monkeypatch, capsys):
    words = "--shape tiny --batch 2 --seq 16 --device cpu --engine max_host_memory=1000 --worker ours-streamed --run r"
    monkeypatch.setattr(sys, "argv", ["step.py", *words.split()])
    assert step.main() == 3
    assert capsys.readouterr().err.startswith("does not fit: ours-streamed: ")


TOY = "--shape tiny --num-layers 2 --seq 16 --device cpu --cpu-threads 1".split()


def tried(monkeypatch, out, *words: str) -> tuple[list[dict], list[int]]:
    """Lines of a search in this process, and the sizes that really trained."""
    monkeypatch.setattr(sys, "argv", ["reach.py", *TOY, *words, "--out", str(out), "--run", "r"])
    trained, measure = [], cases.measure
    monkeypatch.setattr(cases, "measure", lambda one: trained.append((one.batch, one.num_layers)) or measure(one))
    assert reach.main() == 0
    return [json.loads(text) for text in out.read_text().splitlines()], trained


def test_ours_is_planned_at_every_try_and_trains_at_the_largest(monkeypatch, tmp_path):
    limit = "max_host_memory=" + str(9 * 2**20)
    words = ("--engine", limit, "--low", "4", "--high", "4096", "--worker", "ours-streamed:eager")
    (step_line, line), trained = tried(monkeypatch, tmp_path / "r.jsonl", *words)
    found = line["largest"]
    assert trained == [(found, 2)] and step_line["batch"] == found > 4 and step_line["bench"] == "step"
    assert "max_host_memory" in line["why_not"] and line["refused"] <= found + max(found // 64, 1)
    assert sift([step_line, line])[1] == [] and line["tries"] >= 6
    assert sift([line | {"refused": 2 * found}])[1] and sift([line | {"largest": found + 1}])[1]


def test_where_the_plan_was_wrong_the_search_goes_on_below_it(monkeypatch, tmp_path):
    refused(monkeypatch, lambda one: one.num_layers > 3)
    words = ("--over", "num-layers", "--batch", "2", "--high", "5", "--worker", "ours-streamed:eager")
    (step_line, line), trained = tried(monkeypatch, tmp_path / "r.jsonl", *words)
    assert [layers for _, layers in trained] == [5, 4, 3] and (line["largest"], line["refused"]) == (3, 4)
    assert step_line["num_layers"] == 3 and line["params"] == step_line["params"]


def test_the_stock_model_trains_at_every_try(monkeypatch, tmp_path, capsys):
    refused(monkeypatch, lambda one: one.batch > 5)
    out = tmp_path / "r.jsonl"
    (line,), trained = tried(monkeypatch, out, "--worker", "stock-resident")
    assert [batch for batch, _ in trained] == [1, 2, 4, 8, 6, 5] and (line["largest"], line["refused"]) == (5, 6)
    ours = line | {"case": "ours-streamed", "update": "eager", "largest": 45}
    assert [(t.value, t.met) for t in reach.verdicts([line, ours])] == [(9.0, True)]
    layers = [x | {"over": "num_layers"} for x in (line, ours | {"params": 5 * line["params"]})]
    assert [(t.value, t.met) for t in reach.verdicts(layers)] == [(5.0, False)]
    capsys.readouterr()
    assert reach.report(out) == 0 and "stock-resident: batch 5, 6 does not fit" in capsys.readouterr().out


def test_a_case_that_fails_for_another_reason_ends_the_search(monkeypatch, tmp_path):
    def broken(one):
        raise LaneFailure("compute", "forward", ValueError("no"))

    monkeypatch.setattr(cases, "measure", broken)
    with pytest.raises(LaneFailure):
        tried(monkeypatch, tmp_path / "r.jsonl", "--worker", "stock-resident")
