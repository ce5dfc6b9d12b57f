"""Prompts as people write them, and the ids that a model gets of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.byte_tokenizer import make_codec
from slideformer.data.prompts import encode_prompts, read_prompts
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput

ROWS = {
    "text": ({"prompt": "2+2="}, "2+2="),
    "a prompt of messages": ({"prompt": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),
    "messages lose the answer at their end": (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]},
        [{"role": "user", "content": "hi"}],
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "there"}]},
        [{"role": "user", "content": "hi"}],
    ),
    "an instruction": ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, "Add.\n2 and 2"),
    "plain text": ({"text": "Once upon"}, "Once upon"),
    "messages as JSON text": ({"messages": '[{"role": "user", "content": "hi"}]'}, [{"role": "user", "content": "hi"}]),
}


@pytest.fixture
def codec() -> Codec:
    return make_codec()


def rows_file(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS.keys())
def test_a_row_is_the_prompt_that_its_columns_hold(tmp_path: Path, row: dict, expected: object):
    assert read_prompts(rows_file(tmp_path, row)) == [expected]


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second \n")
    assert read_prompts(path) == ["first", "second"]


BAD = {
    "no prompt": ({"question": "?"}, "prompts.jsonl:2: there is no prompt in its columns (question); accepted are"),
    "no list": ({"messages": "hi"}, "prompts.jsonl:2: messages is neither text nor a list of messages"),
    "nobody's": ({"messages": [{"content": "hi"}]}, "messages[0] does not say whose it is"),
    "answers only": ({"messages": [{"role": "assistant", "content": "a"}]}, "no message that waits for an answer"),
}


@pytest.mark.parametrize(("row", "text"), BAD.values(), ids=BAD.keys())
def test_a_row_without_a_prompt_is_told_with_its_line(tmp_path: Path, row: dict, text: str):
    with pytest.raises(BadInput) as error:
        read_prompts(rows_file(tmp_path, {"prompt": "fine"}, row))
    assert text in str(error.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("\n\n")
    with pytest.raises(BadInput, match="has no prompts: give one a line"):
        read_prompts(tmp_path / "prompts.txt")


def test_text_goes_through_the_template_where_there_is_one(codec: Codec):
    (prompt,) = encode_prompts(["hi"], codec)
    assert codec.decode(prompt.ids) == codec.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    (with_system,) = encode_prompts(["hi"], codec, system="Be brief.")
    assert "Be brief." in codec.decode(with_system.ids)
    assert prompt.text == with_system.text == "hi"


def test_raw_text_is_what_the_tokenizer_makes_of_it_without_what_it_puts_behind(codec: Codec):
    (prompt,) = encode_prompts(["hi"], codec, chat=False)
    assert list(prompt.ids) == codec.encode("hi")[: len(codec.encode("hi")) - codec.num_added_behind]
    ending = replace(codec)
    ending.__dict__["num_added_behind"] = 1
    assert encode_prompts(["hi"], ending, chat=False)[0].ids == prompt.ids[:-1]


def test_what_needs_a_template_says_so(codec: Codec):
    codec.tokenizer.chat_template = None
    assert encode_prompts(["hi"], codec)[0].ids == encode_prompts(["hi"], codec, chat=False)[0].ids
    for words, settings, text in (
        ("hi", {"chat": True}, "has no chat template: leave --chat out"),
        ("hi", {"system": "s"}, "a system message needs a chat template"),
        ([{"role": "user", "content": "hi"}], {}, "prompt 1 is a conversation, but the tokenizer"),
    ):
        with pytest.raises(BadInput, match=text):
            encode_prompts([words], codec, **settings)


def test_a_template_that_refuses_is_told_with_the_prompts_number(codec: Codec):
    codec.tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(BadInput, match="prompt 1: the chat template of .* refuses it: no system here"):
        encode_prompts(["hi"], codec)
