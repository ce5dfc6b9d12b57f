"""The report of a run: its numbers, its charts' arithmetic, and what a run's folder may lack."""

from __future__ import annotations

import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slideformer.errors import BadInput
from slideformer.train.charts import label, nice_ticks
from slideformer.train.console import PlainConsole
from slideformer.train.page import report
from slideformer.train.timeline import read_timeline
from slideformer.train.trainer import train


def write_run(folder: Path, *, name: str = "mine") -> list[dict]:
    """A run's folder with made-up numbers, one of them not finite. Returns the lines of metrics.jsonl."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, 41):
        value = None if step == 17 else 6.0 / step + 0.123456789
        lines.append({"global_step": step, "epoch": step / 40, "loss": value, "grad_norm": value and 10 * value,
                      "learning_rate": 1e-5 * (1 - step / 41), "tokens_per_second": 1000.0 + step, "step_time": 0.5,
                      "num_input_tokens_seen": 100 * step, "host_mem_gib": 1.5, "pinned_gib": 0.0,
                      "busy_compute_pct": 90.0 + step / 10, "busy_upload_pct": 10.0})  # fmt: skip
        if step % 10 == 0:
            lines.append(
                {"global_step": step, "epoch": step / 40, "eval_held_loss": 5.0 / step, "eval_held_perplexity": 2.0}
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = {
        "status": "finished",
        "started": "2026-11-30T12:00:00+00:00",
        "num_steps": 40,
        "device": "cpu",
        "memory": {"device": 2**30, "host_state": 2**31},
        "data": [{"path": "a<b>.jsonl", "role": "training", "rows_read": 3, "dropped": {"too long": [2]}}],
        "config": {"run_name": name, "learning_rate": 1e-5},
        "versions": {"torch": "2.13.0"},
        "machine": {"cpus": 2},
    }
    (folder / "run.json").write_text(json.dumps(run))
    return lines


class Page(HTMLParser):
    """curves: name -> (points, path) of each chart; text: all that is read; tags: the elements that were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.curves, self.text, self.tags, self.frame, self.outside = {}, [], [], None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        self.outside += [v for k, v in given.items() if k in ("src", "href")]
        if "data-frame" in given:
            self.frame = json.loads(given["data-frame"])
        if given.get("class") == "curve":
            self.curves[given["data-name"]] = (json.loads(given["data-points"]), given["d"], self.frame)

    def handle_data(self, data):
        self.text.append(data)


def test_curves_are_the_logged_values_and_are_drawn_where_they_belong(tmp_path) -> None:
    lines = write_run(tmp_path / "run")
    page = Page(report(tmp_path / "run"))
    names = {name for line in lines for name in line} - {"global_step", "epoch", "num_input_tokens_seen"}
    assert set(page.curves) == names - {"eval_held_perplexity"}
    for name, (points, path, frame) in page.curves.items():
        logged = [[line["global_step"], line[name]] for line in lines if name in line]
        assert points == logged
        x0, x1, y0, y1, left, right, top, bottom = frame
        drawn = [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]
        finite = [(step, value) for step, value in logged if value is not None]
        expected = [
            (left + (right - left) * (x - x0) / (x1 - x0), bottom - (bottom - top) * (y - y0) / (y1 - y0))
            for x, y in finite
        ]
        assert drawn == [pytest.approx(place, abs=0.006) for place in expected]
        assert all(left <= x <= right and top - 0.01 <= y <= bottom + 0.01 for x, y in drawn)
    # The step that was not finite leaves a gap: the pen is set down twice.
    assert page.curves["loss"][1].count("M") == 2
    assert page.curves["learning_rate"][1].count("M") == 1


def test_the_page_needs_nothing_else_and_shows_names_as_text(tmp_path) -> None:
    write_run(tmp_path / "run", name="<script>alert(1)</script>")
    text = report(tmp_path / "run")
    page = Page(text)
    assert page.outside == []
    assert "http" not in re.sub(r'"http://www.w3.org/2000/svg"', "", text)
    assert page.tags.count("script") == 1
    words = " ".join(page.text)
    for expected in (
        "<script>alert(1)</script>",
        "a<b>.jsonl",
        "dropped: too long",
        "[2]",
        "1.00 GiB",
        "40 of 40",
        "20s",
    ):
        assert expected in words
    assert html.escape("<script>alert(1)") in text


def test_the_report_of_a_real_run_has_its_step_and_tables(config_for) -> None:
    config = config_for(max_steps=5, val_size=4)
    train(config, PlainConsole(io.StringIO()))
    timeline = read_timeline(Path(config.output_dir))
    assert timeline.step == 4  # the first of a process warm up
    assert {"compute", "upload", "download", "update"} <= timeline.lanes.keys()
    kinds = {one.kind for one in timeline.lanes["compute"]}
    assert {"forward", "backward", "head"} <= kinds
    for lane, stretches in timeline.lanes.items():
        assert all(0 <= a.start_s <= a.end_s <= timeline.length_s * 1.0001 for a in stretches), lane
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in zip(stretches, stretches[1:], strict=False)), lane
    words = " ".join(Page(report(Path(config.output_dir))).text)
    for expected in ("Step 4, ", "backward", "rows.jsonl (training)", "learning_rate", "torch", "host_memory_gib"):
        assert expected in words


def test_a_run_under_way_or_killed_has_a_report_and_another_folder_has_none(tmp_path) -> None:
    write_run(tmp_path / "run")
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write('{"global_step": 41, "lo')
    assert "loss" in Page(report(tmp_path / "run")).curves
    (tmp_path / "run/metrics.jsonl").unlink()
    assert Page(report(tmp_path / "run")).curves == {}
    (tmp_path / "run/run.json").write_text("[]")
    with pytest.raises(BadInput, match="run.json cannot be read: it is no object"):
        report(tmp_path / "run")
    with pytest.raises(BadInput, match="has no run.json: give the output_dir of a run"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.123, 6.123, [0, 2, 4, 6, 8]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 9.76e-6, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
        (3, 3, [3, 6]),
        (0, 0, [0, 1]),
    ],
)
def test_axes_have_round_numbers_around_the_values(low, high, ticks) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0002, "0.0002"), (1e-5, "1e-05"), (6000, "6000"), (15000, "15k"), (2.5e6, "2.5M")]
)
def test_numbers_on_axes_are_short(value, text) -> None:
    assert label(value) == text


def test_samples_are_shown_step_by_step_and_as_text(tmp_path) -> None:
    write_run(tmp_path / "run")
    lines = [
        {"global_step": step, "prompt": prompt, "text": f"{step} <i>{prompt}</i>"}
        for step in (10, 20)
        for prompt in ("2+2", "name")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"global_step": 30, "pro'
    (tmp_path / "run" / "generations.jsonl").write_text(text)
    page = Page(report(tmp_path / "run"))
    said = " ".join(page.text)
    assert said.index("Sample: 2+2") < said.index("10 <i>2+2</i>") < said.index("20 <i>2+2</i>")
    assert said.index("20 <i>2+2</i>") < said.index("Sample: name") < said.index("20 <i>name</i>")
    assert "step 30" not in said
