"""What a person sees, on a terminal and in a file."""

from __future__ import annotations

import io

import pytest

from slideformer.train.console import LiveConsole, PlainConsole, duration, open_console, step_text

STEP = {
    "global_step": 3,
    "loss": 1.23456,
    "grad_norm": 12.345,
    "learning_rate": 1e-4,
    "tokens_per_second": 123456.7,
    "eta_seconds": 12345.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_a_step() -> None:
    out = io.StringIO()
    with open_console(out) as console:
        assert isinstance(console, PlainConsole)
        console.note("hello")
        console.warn("careful")
        console.step(STEP, 40)
        console.evaluation({"global_step": 3, "epoch": 1.0, "eval_loss": 0.5, "eval_perplexity": 1.6})
    assert out.getvalue().splitlines() == [
        "hello",
        "warning: careful",
        "step 3/40: loss 1.2346 lr 1.0e-04 norm 12.35 123,457 tok/s eta 3h25m",
        "evaluation after step 3: eval_loss 0.5000",
    ]


def test_a_terminal_gets_a_live_line_of_at_most_80_columns(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with open_console(out) as console:
        assert isinstance(console, LiveConsole)
        console.note("hello [not markup]")
        console.step(STEP, 4000)
    written = out.getvalue()
    assert "hello [not markup]" in written
    assert "loss 1.2346" in written
    assert "3/4000" in written
    assert "eta 3h25m" in written
    bar_and_count = 8 + 1 + len("4000/4000") + 1
    assert bar_and_count + len(step_text(STEP)) <= 80


def test_a_loss_that_is_not_finite_is_said() -> None:
    assert step_text({**STEP, "loss": None, "grad_norm": None}).startswith("loss not finite lr")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (3599, "59m59s"), (7500, "2h05m")]
)
def test_durations(seconds, text) -> None:
    assert duration(seconds) == text
