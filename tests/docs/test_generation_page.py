"""The commands and the Python of docs/generation.md are run."""

from __future__ import annotations

import json

from cli.conftest import slideformer  # noqa: F401 a fixture
from docs.test_docs import ROOT, blocks, commands, place  # noqa: F401 a fixture

PAGE = ROOT / "docs/generation.md"


def test_the_commands_run(slideformer, place) -> None:  # noqa: F811
    (place / "prompts.jsonl").write_text('{"prompt": "2+2="}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    outputs = []
    for words in commands(PAGE):
        done = slideformer(*words, "--device", "cpu", "--cpu-threads", "1")
        assert done.returncode == 0, (words, done.stderr)
        outputs.append(done.stdout)
    one, two, drawn = outputs
    assert ">" not in one.splitlines()[:1]
    assert [g["prompt"] for g in json.loads(two)["generations"]] == ["2+2=", "3+4="]
    assert [line for line in drawn.splitlines() if line.startswith("> ")] == ["> 2+2=", "> hi"]


def test_the_python_example_runs(place, monkeypatch, capsys) -> None:  # noqa: F811
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (example,) = blocks(PAGE, "python")
    exec(compile(example, "generation.md", "exec"), {})
    assert capsys.readouterr().out.strip().splitlines()[-1].split()[-1] in ("stop", "length")
    assert (place / "runs/sampled/model.safetensors").is_file()
