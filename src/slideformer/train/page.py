"""report.html: everything that a run's folder says about it, on one page that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from slideformer.errors import BadInput
from slideformer.memory import size
from slideformer.train import record
from slideformer.train.charts import Point, chart, timeline_chart
from slideformer.train.metrics import GENERATIONS, METRICS
from slideformer.train.panel import duration
from slideformer.train.timeline import read_timeline

COLORS = ("#2f6fde", "#e0742b", "#2f9e5f", "#b5489b", "#8a6d1d", "#3aa3b8", "#c23b3b", "#6a6a6a")
KINDS = {
    "forward": "#2f6fde",
    "backward": "#274f9e",
    "head": "#7a5bd0",
    "embedding": "#b5489b",
    "upload": "#2f9e5f",
    "download": "#3aa3b8",
    "spill": "#8a6d1d",
    "fetch": "#c9a227",
    "rows": "#9bc46a",
    "gather": "#5f8f3f",
    "update": "#e0742b",
    "update-ahead": "#f0a36b",
    "table-update": "#b5541c",
    "new-weights": "#f2c14e",
    "completion": "#d9a07a",
}
Lines = Sequence[Mapping[str, float | int | None]]


def report(folder: Path) -> str:
    """The page of a run, as text. Raises BadInput when the folder holds no run."""
    run = _read_run(folder)
    lines = _read_metrics(folder)
    name = str(_of(run, "config").get("run_name") or folder.resolve().name)
    charts = _sections([*_charts(lines), *_step(folder)])
    tables = _sections([*_samples(folder), *_tables(run)])
    assets = files("slideformer.train") / "page_assets"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{(assets / 'page.css').read_text(encoding='utf-8')}</style></head>"
        f"<body><header><h1>{html.escape(name)}</h1>{_summary(run, lines)}</header><main>{charts}</main>"
        f'<div class="tables">{tables}</div>'
        f"<script>{(assets / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _sections(parts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<section><h2>{html.escape(title)}</h2>{content}</section>" for title, content in parts)


def _read_run(folder: Path) -> dict[str, object]:
    path = folder / record.FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except FileNotFoundError:
        raise BadInput(f"{folder} has no {record.FILE}: give the output_dir of a run") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    return found


def _read_metrics(folder: Path) -> Lines:
    """Lines of metrics.jsonl; one that a killed run left unfinished is passed over."""
    path = folder / METRICS
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            metrics = json.loads(line)
        except ValueError:
            continue
        if isinstance(metrics, dict) and "global_step" in metrics:
            found.append(metrics)
    return found


def _points(lines: Lines, name: str) -> list[Point]:
    return [(float(line["global_step"] or 0), line[name]) for line in lines if name in line]


def _charts(lines: Lines) -> Iterator[tuple[str, str]]:
    names = list(dict.fromkeys(name for line in lines for name in line))
    evaluations = [n for n in names if n.startswith("eval_") and n.endswith("_loss")]
    busy = [n for n in names if n.startswith("busy_")]
    wanted: list[tuple[str, list[str], bool]] = [
        ("Loss per target token", ["loss", *evaluations], False),
        ("Tokens per second", ["tokens_per_second"], True),
        ("Seconds per step", ["step_time"], True),
        ("Gradient norm", ["grad_norm"], True),
        ("Learning rate", ["learning_rate"], True),
        ("Memory, GiB", ["gpu_mem_peak_gib", "host_mem_gib", "pinned_gib"], True),
        ("Busy share of each lane, %", busy, True),
    ]
    for title, members, from_zero in wanted:
        series = {name: _points(lines, name) for name in members if name in names}
        if series:
            legend = "".join(
                f'<li><i style="background:{color}"></i>{html.escape(name)}</li>'
                for name, color in zip(series, COLORS * 8, strict=False)
            )
            yield title, f'<ul class="legend">{legend}</ul>' + chart(series, colors=COLORS, from_zero=from_zero)


def _step(folder: Path) -> Iterator[tuple[str, str]]:
    timeline = read_timeline(folder)
    if timeline is None or not timeline.lanes:
        return
    kinds = list(dict.fromkeys(one.kind for lane in timeline.lanes.values() for one in lane))
    legend = "".join(
        f'<li><i style="background:{KINDS.get(kind, "#888")}"></i>{html.escape(kind)}</li>' for kind in kinds
    )
    title = f"Step {timeline.step}, {timeline.length_s:.3g} s from its first start to its last end"
    yield title, f'<ul class="legend">{legend}</ul>' + timeline_chart(timeline, KINDS)


def _samples(folder: Path) -> Iterator[tuple[str, str]]:
    """What the model wrote, step by step, a table for each prompt. Lines that a killed run left unfinished are passed
    over."""
    path = folder / GENERATIONS
    written: dict[str, dict[str, str]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
            step, shown = f"step {int(line['global_step'])}", str(line["text"])
        except (ValueError, KeyError, TypeError):
            continue
        words = line.get("prompt")
        prompt = words if isinstance(words, str) else json.dumps(words, ensure_ascii=False)
        written.setdefault(prompt, {})[step] = shown
    for prompt, rows in written.items():
        yield f"Sample: {prompt[:80]}", _table(rows)


def _tables(run: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    memory = _of(run, "memory")
    if memory:
        rows = {name: size(float(str(nbytes))) for name, nbytes in memory.items()}
        yield "Memory that was allocated", _table(rows)
    reports = run.get("data")
    for one in reports if isinstance(reports, list) else []:
        yield f"Data: {one.get('path')} ({one.get('role')})", _table(_flat(one))
    yield "Config", _table(_of(run, "config"))
    yield "Versions", _table(_of(run, "versions"))
    yield "Machine", _table({**_of(run, "machine"), **_of(run, "hardware"), "git": run.get("git")})


def _summary(run: Mapping[str, object], lines: Lines) -> str:
    last: dict[str, object] = {}
    for line in lines:
        last |= line
    facts = {
        "status": run.get("status"),
        "started": run.get("started"),
        "step": f"{last.get('global_step', 0)} of {run.get('num_steps', '?')}",
        "loss": last.get("loss"),
        **{name: value for name, value in last.items() if name.startswith("eval_") and name.endswith("loss")},
        "tokens": last.get("num_input_tokens_seen"),
        "training time": duration(sum(float(line.get("step_time") or 0) * steps for line, steps in _intervals(lines))),
        "device": run.get("device"),
        "error": run.get("error"),
    }
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(_shown(value))}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<dl>{cells}</dl>"


def _intervals(lines: Lines) -> Iterator[tuple[Mapping[str, float | int | None], int]]:
    """Each step's line and how many steps it stands for."""
    before = 0
    for line in lines:
        if "step_time" in line:
            step = int(line["global_step"] or 0)
            yield line, step - before
            before = step


def _table(rows: Mapping[str, object]) -> str:
    cells = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(_shown(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<table>{cells}</table>"


def _flat(report: Mapping[str, object]) -> dict[str, object]:
    """A data report with each reason in a row of its own."""
    found: dict[str, object] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            found |= {f"{name}: {reason}": rows for reason, rows in value.items()}
        elif name not in ("path", "role"):
            found[name] = value
    return found


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else text[:400] + " …"


def _of(run: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = run.get(name)
    return found if isinstance(found, dict) else {}
