"""slideformer report"""

from __future__ import annotations

import json

from train.test_report import write_run


def test_report_writes_one_page_beside_the_run_or_where_it_is_told(slideformer, tmp_path) -> None:
    write_run(tmp_path / "run")
    done = slideformer("report", "run")
    assert (done.returncode, done.stdout) == (0, "the report is in run/report.html\n")
    assert json.loads(slideformer("report", "run", "-o", "a.html", "--json").stdout) == {"written": "a.html"}
    assert (tmp_path / "a.html").read_text() == (tmp_path / "run/report.html").read_text()
    done = slideformer("report", "run", "-o", "nowhere/a.html")
    assert (done.returncode, done.stderr[:50]) == (2, "error: nowhere/a.html cannot be written: No such f")
    done = slideformer("report", "nowhere")
    assert (done.returncode, done.stderr) == (2, "error: nowhere has no run.json: give the output_dir of a run\n")
