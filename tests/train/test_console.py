"""What a person sees, on a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest

from slideformer.train.console import LiveConsole, PlainConsole, open_console, step_text
from slideformer.train.panel import View, curve, duration, panel

STEP = {
    "global_step": 3,
    "epoch": 0.25,
    "loss": 1.23456,
    "grad_norm": 12.345,
    "learning_rate": 1e-4,
    "num_input_tokens_seen": 1_234_567,
    "tokens_per_second": 123456.7,
    "step_time": 1.5,
    "eta_seconds": 12345.0,
    "nonfinite_steps": 0,
    "host_mem_gib": 38.5,
    "gpu_mem_peak_gib": 13.7,
    "busy_compute_pct": 90.2,
    "busy_upload_pct": 17.0,
    "busy_download_pct": 9.4,
    "busy_update_pct": 43.0,
    "busy_disk_pct": 2.0,
}
LARGEST = {
    **STEP,
    "global_step": 999_999,
    "loss": 123.45678,
    "grad_norm": 1.234e8,
    "num_input_tokens_seen": 987_654_321_000,
    "tokens_per_second": 1_234_567.0,
    "step_time": 1234.5,
    "eta_seconds": 9e6,
    "epoch": 123.456,
    "nonfinite_steps": 1234,
    **{f"busy_{lane}_pct": 100.0 for lane in ("compute", "upload", "download", "update", "disk")},
}
TIERS = {"device": 13 * 2**30, "host_state": 38 * 2**30, "host_buffers": 2**30}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def viewed(*metrics: dict, num_steps: int = 4000, evaluation: dict | None = None) -> View:
    view = View(num_steps, TIERS, began_s=100.0)
    for one in metrics:
        view.step(one)
    if evaluation:
        view.evaluation(evaluation)
    return view


def test_a_file_gets_one_line_a_step() -> None:
    out = io.StringIO()
    with open_console(out) as console:
        assert isinstance(console, PlainConsole)
        console.note("hello")
        console.warn("careful")
        console.begin(40, {"device": 2**30, "host_state": 2**31})
        console.step(STEP, 40)
        console.evaluation({"global_step": 3, "epoch": 1.0, "eval_loss": 0.5, "eval_perplexity": 1.6})
    assert out.getvalue().splitlines() == [
        "hello",
        "warning: careful",
        "memory: device 1.00 GiB  host_state 2.00 GiB",
        "step 3/40: loss 1.2346 lr 1.0e-04 norm 12.35 123,457 tok/s eta 3h25m",
        "evaluation after step 3: eval_loss 0.5000",
    ]


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_console(Terminal()), PlainConsole)


def test_a_terminal_gets_a_panel_under_what_scrolls_by(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with open_console(out) as console:
        assert isinstance(console, LiveConsole)
        console.note("hello [not markup]")
        console.begin(4000, TIERS)
        console.step(STEP, 4000)
        console.warn("careful")
        console.evaluation({"global_step": 3, "eval_loss": 0.5})
    written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for expected in ("hello [not markup]", "warning: careful", "evaluation after step 3", "loss 1.2346", "3/4,000"):
        assert expected in written
    last = written.splitlines()[-1]
    assert last.startswith("busy  compute 90%  upload 17%")


def test_the_panel_says_how_far_how_fast_how_well_and_with_what() -> None:
    evaluation = {"global_step": 1000, "eval_loss": 1.5, "eval_perplexity": 4.5}
    lines = panel(viewed(STEP, {**STEP, "global_step": 1000}, evaluation=evaluation), 160.0).plain.splitlines()
    assert lines[1].startswith("step 1,000/4,000 ━")
    assert lines[1].endswith("━  25%  1m00s  eta 3h25m")
    assert lines[2:] == [
        "loss 1.2346  lr 1.0e-04  norm 12.3   ▁▁",
        "speed 123,457 tokens/s  step 1.5 s  epoch 0.25  tokens 1.23M",
        "eval_loss 1.5000   after step 1,000",
        "memory  device 13.0G  state 38.0G  buffers 1.0G  GPU peak 13.7G  process 38.5G",
        "busy  compute 90%  upload 17%  download 9%  update 43%  disk 2%",
    ]


@pytest.mark.parametrize("metrics", [STEP, LARGEST, {**LARGEST, "loss": None, "grad_norm": None}])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_of_the_panel_is_wider_than_the_terminal_or_80(metrics, width, ascii_only) -> None:
    many = {"global_step": 999_999, **{f"eval_set_number_{i}_loss": 1.0 for i in range(9)}}
    view = viewed(*[metrics] * 50, num_steps=1_000_000, evaluation=many)
    text = panel(view, 9e6, width=width, ascii_only=ascii_only).plain
    assert max(map(len, text.splitlines())) <= min(width, 80)
    assert len(text.splitlines()) == 7
    assert text.isascii() or not ascii_only
    if width >= 80:
        assert ("not finite" in text) == (metrics["loss"] is None or metrics["nonfinite_steps"] > 0)


def test_before_the_first_step_the_panel_has_what_is_known() -> None:
    lines = panel(viewed(), 103.0).plain.splitlines()
    assert lines[1].startswith("step 0/4,000 ━")
    assert lines[1].endswith("   0%  3s")
    assert lines[2].startswith("memory  device 13.0G")


def test_a_curve_goes_from_the_lowest_to_the_highest() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert curve([7, 0, 3.5]) == "█▁▅"
    assert curve([2, 2]) == "▁▁"
    assert curve([]) == ""


def test_a_loss_that_is_not_finite_is_said() -> None:
    assert step_text({**STEP, "loss": None, "grad_norm": None}).startswith("loss not finite lr")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (3599, "59m59s"), (7500, "2h05m"), (273600, "3d04h")],
)
def test_durations(seconds, text) -> None:
    assert duration(seconds) == text
