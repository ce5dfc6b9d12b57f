"""The report in Chromium: what is drawn, and what is told under the mouse, is what was logged."""

from __future__ import annotations

import html
import json
import re

import pytest

from slideformer.train.page import report
from train.test_report import write_run

# Moves the mouse over every step of every chart, and reads where curves lie and what is told there.
PROBE = """
<pre id="found"></pre>
<script>
window.onerror = (message) => { document.getElementById("found").dataset.error = message; };
const found = [];
for (const chart of document.querySelectorAll("svg.chart")) {
  const [x0, x1, y0, y1, left, right, top, bottom] = JSON.parse(chart.dataset.frame);
  const box = chart.getBoundingClientRect();
  const scale = box.width / chart.viewBox.baseVal.width;
  for (const path of chart.querySelectorAll(".curve")) {
    const drawn = [...path.getAttribute("d").matchAll(/[ML]([-\\d.]+) ([-\\d.]+)/g)].map((m) => [
      x0 + ((m[1] - left) / (right - left)) * (x1 - x0), y0 + ((bottom - m[2]) / (bottom - top)) * (y1 - y0)]);
    const told = JSON.parse(path.dataset.points).map(([step]) => {
      const x = box.left + scale * (left + ((step - x0) / (x1 - x0)) * (right - left));
      chart.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: box.top + 50 }));
      return chart.parentNode.querySelector(".tip").textContent;
    });
    found.push({ name: path.dataset.name, drawn, told, length: path.getTotalLength(),
                 step_y: (y1 - y0) / (bottom - top), shown: box.width > 300 && box.height > 80 });
  }
}
document.getElementById("found").textContent = JSON.stringify(found);
</script>
"""


@pytest.fixture
def curves(document_of, tmp_path):
    """name -> what the browser has of it; and the lines that were logged."""
    lines = write_run(tmp_path / "run")
    page = document_of(report(tmp_path / "run").replace("</body>", PROBE + "</body>"))
    assert "data-error" not in page
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', page, re.DOTALL)[1]))
    return {curve["name"]: curve for curve in found}, lines


def test_every_value_drawn_and_told_is_the_one_that_was_logged(curves) -> None:
    found, lines = curves
    assert {"loss", "eval_held_loss", "grad_norm", "tokens_per_second", "busy_compute_pct"} <= found.keys()
    for name, curve in found.items():
        logged = [(line["global_step"], line[name]) for line in lines if name in line]
        values = [(step, value) for step, value in logged if value is not None]
        assert curve["shown"] and curve["length"] > 0
        assert [x for x, _ in curve["drawn"]] == pytest.approx([step for step, _ in values], abs=0.01)
        # A path is written to a hundredth of a pixel.
        assert [y for _, y in curve["drawn"]] == pytest.approx([v for _, v in values], abs=0.011 * curve["step_y"])
        for (step, value), told in zip(logged, curve["told"], strict=True):
            said = dict(
                row.rsplit(" ", 1) if "not finite" not in row else (row[:-11], None) for row in told.split("\n")
            )
            assert said["step"] == str(step)
            assert (said[name] is None) if value is None else float(said[name]) == pytest.approx(value, rel=1e-5)
