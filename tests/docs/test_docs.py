"""What the docs tell people to write and to run is written and run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from cli.conftest import slideformer  # noqa: F401 a fixture
from slideformer.cli.config_file import load_config
from slideformer.config import TrainConfig
from train.toy import make_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = ["device=cpu", "cpu_threads=1", "tile_numel=4096"]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; "" are those without."""
    found, inside = [], None
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("```"):
            if inside is None:
                inside = line[3:].strip()
                text = ""
            else:
                if inside == language:
                    found.append(text)
                inside = None
        elif inside is not None:
            text += line
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my-model and data.jsonl, which is where we are. The docs' own rows, a few times over."""
    make_model(tmp_path / "my-model")
    (rows,) = blocks(ROOT / "docs/first-finetune.md", "json")
    (tmp_path / "data.jsonl").write_text(rows * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "yaml")], ids=lambda page: page.stem)
def test_every_yaml_is_a_config(page, tmp_path) -> None:
    for text in blocks(page, "yaml"):
        required = {"model_name_or_path": "my-model", "dataset": "data.jsonl"}
        missing = [
            f"{key}={value}" for key, value in required.items() if not re.search(rf"^{key}:", text, re.MULTILINE)
        ]
        (tmp_path / "train.yaml").write_text(text)
        assert load_config(tmp_path / "train.yaml", missing).notices == (), text


def commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("slideformer ")]


def test_the_first_fine_tune_works_from_top_to_bottom(slideformer, place) -> None:  # noqa: F811
    page = ROOT / "docs/first-finetune.md"
    start, later = blocks(page, "yaml")
    for words in commands(page):
        done = slideformer(*words, *(QUICK if words[0] in ("train", "evaluate", "preview") else []))
        assert done.returncode == 0, (words, done.stderr)
        if words[:2] == ["config", "init"]:
            (place / "train.yaml").write_text(start)
    for name in ("model.safetensors", "metrics.jsonl", "run.json", "timeline.json", "loss.png", "report.html"):
        assert (place / "runs/first" / name).is_file(), name
    (place / "early.yaml").write_text(later)
    done = slideformer("train", "early.yaml", *QUICK, "max_steps=2", "val_size=2", "eval_steps=1", "save_steps=1")
    assert done.returncode == 0, done.stderr


def test_the_python_examples_run(place, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = blocks(ROOT / "docs/python-api.md", "python")
    exec(compile(first, "python-api.md", "exec"), {})
    said = capsys.readouterr().out
    assert (place / "runs/copy/model.safetensors").is_file()
    steps = said.strip().splitlines()[-2].split()
    assert float(steps[1]) < float(steps[0]) and steps[2] == "4"
    exec(compile(second, "python-api.md", "exec"), {})
    (shortest,) = blocks(ROOT / "README.md", "python")
    exec(compile(shortest, "README.md", "exec"), {})
    assert (place / "runs/callbacks/checkpoint-2").is_dir()


def test_the_commands_of_the_memory_guide_run(slideformer, place) -> None:  # noqa: F811
    page = ROOT / "docs/memory-guide.md"
    (place / "train.yaml").write_text(blocks(page, "yaml")[0])
    for words in commands(page):
        done = slideformer(*words, *(["device=cuda"] if words[0] == "plan" else []))
        assert done.returncode == 0, (words, done.stderr)


def test_the_memory_guide_counts_host_memory_as_the_plan_does(slideformer, place) -> None:  # noqa: F811
    """14 bytes a parameter with clipping, 12 without, 2 for a frozen one; bf16, nothing on the GPU."""
    (place / "train.yaml").write_text(blocks(ROOT / "docs/memory-guide.md", "yaml")[0])

    def terms(*words: str) -> tuple[dict, int]:
        found = json.loads(
            slideformer("plan", "train.yaml", "device=cuda", "placement=stream", "--json", *words).stdout
        )
        return found["host"], found["parameters"]

    state = ("weights", "residuals", "first moments", "second moments")

    def bytes_of(host: dict[str, int], *names: str) -> int:
        return sum(host.get(name, 0) for name in names)

    clipped, numel = terms()
    plain, _ = terms("max_grad_norm=0")
    frozen, _ = terms("freeze=^(?!model.norm)")
    assert bytes_of(clipped, *state) == bytes_of(plain, *state) == pytest.approx(12 * numel, rel=0.01)
    assert bytes_of(clipped, "waiting gradients") == pytest.approx(2 * numel, rel=0.01)
    assert bytes_of(plain, "waiting gradients") == 0
    assert bytes_of(frozen, *state, "waiting gradients") == pytest.approx(2 * numel, rel=0.02)


TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
SAVING = ["save_steps=2"]
TIER = ["offload_optimizer=nvme", "offload_dir=tier"]
TRIGGERS: dict[str, list[str]] = {  # heading of troubleshooting.md -> words that bring the message about
    "unknown key": ["lerning_rate=1"],
    "is not given, and it has no default": ["--no-file"],
    "are both given: keep one": ["warmup_ratio=0.1", "warmup_steps=5"],
    "should be a valid number": ["learning_rate=fast"],
    "eager cannot clip": ["update=eager"],
    "cannot be used with lr_scheduler_kwargs": ["lr_scheduler_type=warmup_stable_decay"],
    "which no evaluation gives": ["val_size=1", "early_stopping_patience=1", "metric_for_best_model=bleu"],
    "which is not installed: pip install": ["report_to=mlflow"],
    "leave it out": ["lora_r=8"],
    "has no effect": ["gradient_checkpointing=true"],
    "is not a folder; give the folder of a Hugging Face checkpoint": ["model=nowhere"],
    "dropout": ["model=with-dropout"],
    "but no safetensors": ["model=pickled"],
    "no layout fits its columns": ["dataset=columns.jsonl"],
    "does not exist": ["dataset=nowhere.jsonl"],
    "can be used, of": ["dataset=empty.jsonl"],
    "not valid JSON": ["dataset=torn.jsonl"],
    "leads out of its folder": ["dataset=links"],
    "this run needs": ["max_host_memory=1MiB"],
    "Look at these rows, lower learning_rate": [
        *("learning_rate=1e38", "warmup_steps=0", "max_grad_norm=0", "lr_scheduler_type=constant"),
    ],
    "has checkpoints of an earlier run": SAVING,
    "cannot be continued with this config": [*SAVING, "resume=auto", "learning_rate=1"],
    "the last bits may differ from an unbroken run's": [*SAVING, "resume=auto", "attn_implementation=eager"],
    "gets nothing more of this run": ["report_to=tensorboard"],
    "batches are cut from encoded rows inside the run": ["num_workers=4"],
    "but offload_dir is not given": ["offload_optimizer=nvme"],
    "has other files in it": ["offload_optimizer=nvme", "offload_dir=.", "output_dir=../out"],
    "but the device is the CPU, and only a GPU has it": ["use_gds=true", "offload_dir=tier"],
    "would pass max_disk_writes": [*TIER, "max_disk_writes=4MB", "max_steps=9"],
    "filling offload_dir and 2 steps write": [*TIER, "max_disk_writes=1MB"],
}
AFTER_A_RUN = (
    "has checkpoints of an earlier run",
    "cannot be continued with this config",
    "the last bits may differ from an unbroken run's",
)
CODES = {
    "this run needs": 3,
    "Look at these rows, lower learning_rate": 1,
    "would pass max_disk_writes": 1,
    "gets nothing more of this run": 0,
    "the last bits may differ from an unbroken run's": 0,
    "batches are cut from encoded rows inside the run": 0,
    "has no effect": 0,
}
ELSEWHERE = {  # tried where they are made
    "one block is on the device at a time": "engine/settle.py",
    "could not be page-locked": "device/cuda.py",
    "of a run that was killed": "memory/disk_found.py",
    "of a run that kept its files": "memory/disk_found.py",
    "is used by a run that is at work": "memory/disk_found.py",
    "is not what this run wrote": "memory/disk.py",
    "earlier starts of this run have written": "train/disk_use.py",
    "GPUDirect Storage needs kvikio": "memory/disk_gds.py",
    "GPUDirect Storage is emulated here": "memory/disk.py",
    "an answer without an end token": "data/encode.py",
    "another process is writing to": "train/output.py",
    "the checkpoints need": "train",
    "the run goes on unseen": "train/steady.py",
    "has files that are not an earlier export's": "train/export.py",
    "lines are missing until there is room": "train/lines.py",
    "standard output cannot be written": "cli/exits.py",
    "have no effect": "model/sampling.py",
    "triton is not installed": "model/elementwise.py",
}


class Refusing:
    """A tracker's writer that cannot be made."""

    def __init__(self, *given: object, **named: object) -> None:
        raise ConnectionError("refused")


@pytest.fixture
def trouble(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that the triggers name."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlflow" else find(name, *more)
    )
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Refusing)
    make_model(place / "with-dropout", attention_dropout=0.1)
    (make_model(place / "pickled") / "model.safetensors").rename(place / "pickled/pytorch_model.bin")
    for name, text in (("columns", '{"question": "a"}'), ("empty", '{"text": ""}'), ("torn", TALK + '\n{"text": ')):
        (place / f"{name}.jsonl").write_text(text + "\n")
    text = "model_name_or_path: my-model\ndataset: data.jsonl\noutput_dir: out\nmax_length: 128\nmax_steps: 2\n"
    (place / "train.yaml").write_text(text)
    (place / "links").mkdir()
    (place / "links/rows.jsonl").symlink_to(place / "data.jsonl")
    return place


def headings() -> list[str]:
    return re.findall(r"^### (.*)$", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_message_of_the_troubleshooting_page_is_tried() -> None:
    assert sorted(headings()) == sorted({*TRIGGERS, *ELSEWHERE})
    for heading, source in ELSEWHERE.items():
        where = ROOT / "src/slideformer" / source
        text = "".join(p.read_text() for p in ([where] if where.is_file() else where.glob("*.py")))
        assert heading in text, heading


@pytest.mark.parametrize("heading", list(TRIGGERS))
def test_the_messages_of_the_troubleshooting_page_are_the_real_ones(slideformer, trouble, heading) -> None:  # noqa: F811
    words = TRIGGERS[heading]
    if heading in AFTER_A_RUN:
        assert slideformer("train", "train.yaml", *QUICK, *SAVING).returncode == 0
    given = QUICK if words == ["--no-file"] else ["train.yaml", *QUICK, *words]
    done = slideformer("train", *given)
    assert heading in " ".join((done.stderr + done.stdout).split())
    assert done.returncode == CODES.get(heading, 2)


def test_every_command_in_the_docs_is_one() -> None:
    from slideformer.cli.app import app, config_app

    names = {c.name or c.callback.__name__ for c in app.registered_commands} | {"config"}
    config_names = {c.name or c.callback.__name__ for c in config_app.registered_commands}
    for page in PAGES:
        for words in [
            *commands(page),
            *[shlex.split(c)[1:] for c in re.findall(r"`(slideformer [^`]*)`", page.read_text())],
        ]:
            assert words[0] in names, (page, words)
            assert words[0] != "config" or words[1] in config_names, (page, words)
            for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
                assert flag in flags_of(app, config_app, words), (page, words)


def flags_of(app: typer.Typer, config_app: typer.Typer, words: list[str]) -> set[str]:
    """What may stand behind a command: its own options, and every setting where it takes a config."""
    group, name = (config_app, words[1]) if words[0] == "config" else (app, words[0])
    command = typer.main.get_command(group).commands[name]
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    settings = {key for field in TrainConfig.model_fields for key in (f"--{field}", f"--{field.replace('_', '-')}")}
    return own | {"--help"} | (settings if any(p.name == "settings" for p in command.params) else set())
