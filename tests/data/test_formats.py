"""Layouts: which columns mean what, and which rows of each are usable."""

from __future__ import annotations

import json
import re

import pytest

from slideformer.data.formats import RowFormat, parse_row
from slideformer.data.rows import Chat, Completion, Instruction, RawRow, Reason, Text, Tokens, UnusableRow
from slideformer.errors import BadInput

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
WEATHER = {"name": "weather", "description": "of a place", "parameters": {}}
CALL = {"name": "weather", "arguments": {"place": "Rome"}}


def parse(row: dict[str, object], **row_format: object):
    return parse_row(RawRow("rows.jsonl", 3, row), RowFormat(**row_format))


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("columns", "content"),
    [
        ({"messages": HI}, Chat(HI)),
        ({"messages": json.dumps(HI)}, Chat(HI)),
        ({"messages": [{**message, "tool_calls": None} for message in HI]}, Chat(HI)),
        ({"messages": HI, "tools": [WEATHER]}, Chat(HI, tools=[{"type": "function", "function": WEATHER}])),
        ({"messages": HI, "tools": "[]"}, Chat(HI)),
        ({"conversations": SHAREGPT}, Chat(HI)),
        ({"conversations": HI}, Chat(HI)),
        ({"conversations": SHAREGPT, "system": "be"}, Chat([{"role": "system", "content": "be"}, *HI])),
        ({"prompt": "a", "completion": "b"}, Completion("a", "b")),
        ({"prompt": HI, "completion": HI[1:]}, Chat([*HI, HI[1]], answers_from=2, has_prompt=True)),
        ({"messages": [{**m, "content": PARTS} for m in HI]}, Chat([{**m, "content": "one two"} for m in HI])),
        ({"text": "abc"}, Text("abc")),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, Tokens([1, 2], [1, 2])),
        ({"input_ids": "[1, 2]", "labels": [-100, 2]}, Tokens([1, 2], [-100, 2])),
    ],
)
def test_a_row_means_what_its_columns_say(columns, content) -> None:
    assert parse(columns) == content


def test_calls_and_their_results_in_sharegpt_files_become_openais() -> None:
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    chat = parse({"conversations": turns, "tools": json.dumps([WEATHER])})
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert chat.tools == [{"type": "function", "function": WEATHER}]


def test_an_instruction_is_both_a_conversation_and_a_prompt() -> None:
    row = parse({"instruction": "add", "input": "2 {2}", "output": "4", "system": "be", "history": [["a", "b"]]})
    assert isinstance(row, Instruction)
    assert [m["content"] for m in row.chat.messages] == ["be", "a", "b", "add\n2 {2}", "4"]
    assert row.plain.prompt.endswith("### Input:\n2 {2}\n\n### Response:\n")
    for empty in ("", "  ", None):
        assert parse({"instruction": "add", "input": empty, "output": "4"}).chat.messages[0]["content"] == "add"


def test_columns_are_found_under_the_names_that_the_file_has_for_them() -> None:
    row = {"question": "a", "answer": "b", "text": "not this", "messages": HI}
    assert parse(row, columns={"prompt": "question", "completion": "answer"}) == Completion("a", "b")
    assert parse({"body": "abc", "messages": HI}, text_field="body") == Text("abc")
    assert parse({"body": "abc", "x": 1}, columns={"text": "body"}) == Text("abc")


def test_a_format_that_is_asked_for_wins_over_what_else_the_columns_could_be() -> None:
    row = {"messages": HI, "text": "abc", "prompt": "a", "completion": "b"}
    assert parse(row) == Chat(HI)
    assert parse(row, name="text") == Text("abc")
    assert parse(row, name="prompt_completion") == Completion("a", "b")
    with pytest.raises(BadInput, match=r"rows.jsonl:3: format is alpaca, which needs the columns instruction and outp"):
        parse(row, name="alpaca")


def test_columns_that_fit_nothing_are_listed_with_all_that_would() -> None:
    expected = re.escape("rows.jsonl:3: no layout fits its columns (question, answer): accepted are {")
    with pytest.raises(BadInput, match=expected) as caught:
        parse({"question": "a", "answer": "b"})
    for word in ("messages", "conversations", "instruction", "completion", "text", "input_ids", "columns: {prompt: qu"):
        assert word in str(caught.value)
    with pytest.raises(BadInput, match=r"with columns: \{prompt: asked\}"):
        parse({"question": "a", "answer": "b"}, columns={"prompt": "asked"})


def test_pairs_of_answers_are_not_taken_for_conversations_unless_a_column_is_named() -> None:
    row = {"prompt": "a", "chosen": "good", "rejected": "bad", "text": "a good one"}
    with pytest.raises(BadInput, match=r"rows.jsonl:3: the rows are pairs .* columns: \{completion: chosen\}"):
        parse(row)
    assert parse(row, columns={"completion": "chosen"}) == Completion("a", "good")
    assert parse(row, name="text") == Text("a good one")


@pytest.mark.parametrize(
    ("columns", "reason", "found"),
    [
        ({"messages": []}, Reason.BAD_MESSAGES, "found []"),
        ({"messages": "hi"}, Reason.BAD_MESSAGES, 'found "hi"'),
        ({"messages": [{"role": "human", "content": "a"}]}, Reason.BAD_ROLE, "messages[0] has role 'human', allowed"),
        ({"messages": HI[:1]}, Reason.NO_ASSISTANT, "found roles user"),
        ({"messages": [HI[0], {"role": "assistant", "content": " "}]}, Reason.EMPTY_ANSWER, "messages[1] says nothing"),
        ({"messages": [{"role": "user", "content": [1]}, HI[1]]}, Reason.NOT_TEXT, "messages[0].content is a list"),
        ({"messages": HI, "tools": "weather"}, Reason.BAD_TOOLS, "tools is a str"),
        ({"conversations": [{"from": "bob", "value": "a"}]}, Reason.BAD_ROLE, "conversations[0] is from 'bob', allo"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, Reason.BAD_MESSAGES, "without a name"),
        ({"conversations": [{"from": "human"}, SHAREGPT[1]]}, Reason.NOT_TEXT, "messages[0].content is a NoneType"),
        ({"prompt": "a", "completion": ""}, Reason.EMPTY_ANSWER, "completion is empty"),
        ({"prompt": HI, "completion": "b"}, Reason.NOT_TEXT, "prompt is a list"),
        ({"instruction": "a", "output": None}, Reason.NOT_TEXT, "output is a NoneType"),
        ({"instruction": "a", "input": 1, "output": "b"}, Reason.NOT_TEXT, "input is a int"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, Reason.BAD_MESSAGES, "[question, answer]"),
        ({"text": " "}, Reason.EMPTY_TEXT, "text is empty"),
        ({"text": 5}, Reason.NOT_TEXT, "text is a int"),
        ({"input_ids": [1, -1]}, Reason.BAD_TOKENS, "input_ids is not a list of integers from 0"),
        ({"input_ids": [1, 2**31]}, Reason.BAD_TOKENS, "input_ids is not a list of integers from 0 to 2147483647"),
        ({"input_ids": [1, True]}, Reason.BAD_TOKENS, "input_ids is not a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, Reason.BAD_TOKENS, "2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "labels": [1, -5]}, Reason.BAD_TOKENS, "the label -5 is neither -100 nor an id"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(columns, reason, found) -> None:
    with pytest.raises(UnusableRow) as caught:
        parse(columns)
    assert caught.value.reason is reason
    assert found in str(caught.value)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": "x"}, {"type": "text"}, "text", {"text": "a"}])
def test_parts_of_a_message_that_are_not_text_are_no_text(part) -> None:
    with pytest.raises(UnusableRow, match=r"messages\[0\].content is a list"):
        parse({"messages": [{**HI[0], "content": [*PARTS, part]}, HI[1]]})
