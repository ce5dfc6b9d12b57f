"""A run with a chat template of its own: trained on, and given away with the model."""

from __future__ import annotations

import io
import json

import pytest
from transformers import AutoTokenizer

from slideformer.train.console import PlainConsole
from slideformer.train.trainer import Trainer, train

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}={{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)


@pytest.mark.parametrize("given", ["in the folder", "in Python"])
def test_the_template_that_was_trained_with_is_the_one_of_the_result(config_for, tmp_path, given) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    config = config_for(max_steps=1, chat_template=str(tmp_path / "own.jinja"))
    if given == "in Python":
        own = AutoTokenizer.from_pretrained(config.model_name_or_path)
        before = own.chat_template
        Trainer(args=config, processing_class=own).train()
        assert own.chat_template == before
    else:
        train(config, PlainConsole(io.StringIO()))
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    asked = [{"role": "user", "content": "1+1"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) == "user=1+1<end>assistant="
    data = json.loads((tmp_path / "out/run.json").read_text())["data"][0]
    rows = [json.loads(line)["messages"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    expected = sum(len(f"user={a['content']}assistant={b['content']}") + 2 for a, b in rows)
    assert data["tokens"] == expected
