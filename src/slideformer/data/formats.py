"""The layouts a row may have, by the columns it has, and what a usable row of each is.

Layouts are those that people's files have: OpenAI's messages, ShareGPT's conversations, Alpaca's instructions, prompt
and completion, plain text, token ids. What they mean is one of the values of `rows`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slideformer.data.rows import (
    Block,
    Chat,
    Completion,
    Content,
    Instruction,
    Message,
    RawRow,
    Reason,
    Text,
    Tokens,
    UnusableRow,
)
from slideformer.errors import BadInput

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"model": "assistant", "function_call": "assistant", "observation": "tool", "function_response": "tool"},
}
"""Who speaks in ShareGPT files, and the role that is."""

NEEDED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
"""Format -> the columns without which a row is not of it. Where several fit, the first is taken."""

PREFERENCES = frozenset(("chosen", "rejected"))  # columns of rows for another kind of training
LAYOUTS = """{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, \
{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}, \
{"instruction": ..., "input": ..., "output": ...}, \
{"prompt": ..., "completion": ...} (both text or both lists of messages), {"text": ...}, \
or {"input_ids": [...], "labels": [...]}"""

# What models were first trained with on such rows: github.com/tatsu-lab/stanford_alpaca, README, "Data Release".
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of one dataset are read. name: a key of `NEEDED`, or auto. columns: ours -> the file's."""

    name: str = "auto"
    text_field: str = "text"
    columns: Mapping[str, str] = field(default_factory=dict)


def parse_row(row: RawRow, row_format: RowFormat) -> Content:
    """The content of a row.

    Raises BadInput when no layout fits its columns, UnusableRow when a layout fits but the values do not.
    """
    if isinstance(row.columns, Block):
        _text(row.columns.text, "the file")
        return row.columns
    columns = _renamed(row.columns, row_format)
    layout = _layout(columns, row, row_format)
    match layout:
        case "messages":
            return Chat(_messages(_parsed(columns["messages"])), tools=_tools(columns))
        case "sharegpt":
            return Chat(_conversation(columns), tools=_tools(columns))
        case "prompt_completion":
            return _prompt_and_completion(columns)
        case "alpaca":
            return _instruction(columns)
        case "tokens":
            return _tokens(columns)
        case _:
            return Text(_text(columns["text"], row_format.text_field))


def _renamed(columns: Mapping[str, object], row_format: RowFormat) -> Mapping[str, object]:
    """The row under our names for its columns."""
    names = dict(row_format.columns)
    if row_format.text_field != "text":
        names.setdefault("text", row_format.text_field)
    if not names:
        return columns
    found = {ours: columns[theirs] for ours, theirs in names.items() if theirs in columns}
    return {**{k: v for k, v in columns.items() if k not in names and k not in names.values()}, **found}


def _layout(columns: Mapping[str, object], row: RawRow, row_format: RowFormat) -> str:
    """The name of the layout that fits. One whose columns were named in the config wins over what else there is."""
    asked = row_format.name
    named = {*row_format.columns, *(["text"] if row_format.text_field != "text" else [])}
    fitting = [
        name
        for name, needed in NEEDED.items()
        if asked in ("auto", name) and all(column in columns for column in needed)
    ]
    if not named and asked == "auto" and PREFERENCES <= columns.keys():
        raise BadInput(
            f"{row.where}: the rows are pairs of a better and a worse answer (chosen, rejected), from which nothing is "
            "learned here; to train on the better ones, name them: columns: {completion: chosen}"
        )
    if fitting:
        return next((name for name in fitting if named.intersection(NEEDED[name])), fitting[0])
    found = ", ".join(map(str, row.columns)) or "none"
    raise BadInput(f"{row.where}: {_mismatch(asked, found, row_format)}")


def _mismatch(asked: str, found: str, row_format: RowFormat) -> str:
    absent = [f"{ours}: {theirs}" for ours, theirs in row_format.columns.items()]
    renamed = f", with columns: {{{', '.join(absent)}}}" if absent else ""
    if row_format.text_field != "text":
        renamed += f", with dataset_text_field: {row_format.text_field} in place of text"
    if asked != "auto":
        needed = " and ".join(NEEDED[asked])
        return (
            f"format is {asked}, which needs the columns {needed}{renamed}, but the row has {found}: set format or "
            "columns of the dataset"
        )
    return (
        f"no layout fits its columns ({found}): accepted are {LAYOUTS}{renamed}; dataset_text_field names another text "
        "column, and columns of a dataset says what other columns are called, as in columns: {prompt: question}"
    )


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UnusableRow(Reason.NOT_TEXT, f"{name} is a {type(value).__name__}")
    if not value.strip():
        raise UnusableRow(Reason.EMPTY_TEXT, f"{name} is empty")
    return value


def _parsed(value: object) -> object:
    """Tables hold lists as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # the second: [[[[... without end
            return value
    return value


def _messages(value: object) -> Sequence[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UnusableRow(Reason.BAD_MESSAGES, f"found {json.dumps(value, default=str)[:80]}")
    messages = [_with_text(_without_nulls(message)) for message in value]
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UnusableRow(Reason.BAD_ROLE, f"messages[{index}] has role {role!r}, allowed are {', '.join(ROLES)}")
        calls = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not (content is None and calls):
            raise UnusableRow(Reason.NOT_TEXT, f"messages[{index}].content is a {type(content).__name__}")
        if role == "assistant" and not calls and not str(content).strip():
            raise UnusableRow(Reason.EMPTY_ANSWER, f"messages[{index}] says nothing")
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRow(Reason.NO_ASSISTANT, f"found roles {', '.join(str(m['role']) for m in messages)}")
    return messages


def _with_text(message: Message) -> Message:
    """OpenAI's list of parts is the text of them, where all are text."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        return message
    texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
    return {**message, "content": "".join(texts)} if all(isinstance(text, str) for text in texts) else message


def _without_nulls(message: Message) -> Message:
    """Tables give every message every key that any has; templates ask whether a key is there."""
    return {key: value for key, value in message.items() if value is not None or key in ("role", "content")}


def _tools(columns: Mapping[str, object]) -> Sequence[object] | None:
    """As OpenAI writes them: a bare function is put into {"type": "function", "function": ...}."""
    tools = _parsed(columns.get("tools"))
    if tools is None or tools == "" or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRow(Reason.BAD_TOOLS, f"tools is a {type(tools).__name__}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _conversation(columns: Mapping[str, object]) -> Sequence[Message]:
    turns = _parsed(columns["conversations"])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow(Reason.BAD_MESSAGES, f"found {json.dumps(turns, default=str)[:80]}")
    messages = [_turn(index, turn) if "from" in turn else turn for index, turn in enumerate(turns)]
    return _messages([*_system(columns), *messages])


def _turn(index: int, turn: Message) -> Message:
    speaker, value = turn["from"], turn.get("value")
    role = SPEAKERS.get(str(speaker))
    if role is None:
        known = ", ".join(SPEAKERS)
        raise UnusableRow(Reason.BAD_ROLE, f"conversations[{index}] is from {speaker!r}, allowed are {known}")
    if speaker != "function_call":
        return {"role": role, "content": value}
    call = _parsed(value)
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(one, dict) and "name" in one for one in calls):
        raise UnusableRow(Reason.BAD_MESSAGES, f"conversations[{index}] is a function_call without a name")
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _system(columns: Mapping[str, object]) -> list[Message]:
    system = columns.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []


def _prompt_and_completion(columns: Mapping[str, object]) -> Completion | Chat:
    prompt, completion = _parsed(columns["prompt"]), _parsed(columns["completion"])
    if isinstance(prompt, list) and isinstance(completion, list):
        system = _system(columns)
        messages = _messages([*system, *prompt, *completion])
        return Chat(messages, answers_from=len(system) + len(prompt), tools=_tools(columns), has_prompt=True)
    return _completion(columns["prompt"], columns["completion"], "prompt", "completion")


def _completion(prompt: object, completion: object, *names: str) -> Completion:
    for name, value in zip(names, (prompt, completion), strict=True):
        if not isinstance(value, str):
            raise UnusableRow(Reason.NOT_TEXT, f"{name} is a {type(value).__name__}")
    assert isinstance(prompt, str) and isinstance(completion, str)
    if not completion.strip():
        raise UnusableRow(Reason.EMPTY_ANSWER, f"{names[1]} is empty")
    return Completion(prompt, completion)


def _instruction(columns: Mapping[str, object]) -> Instruction:
    asked = _completion(columns["instruction"], columns["output"], "instruction", "output")
    further = columns.get("input")
    if further is not None and not isinstance(further, str):
        raise UnusableRow(Reason.NOT_TEXT, f"input is a {type(further).__name__}")
    instruction = asked.prompt
    has_input = bool(further and further.strip())
    form = ALPACA_WITH_INPUT if has_input else ALPACA_WITHOUT_INPUT
    plain = Completion(form.format(instruction=instruction, input=further), asked.completion)
    said = [message for turn in _history(columns) for message in turn]
    question = {"role": "user", "content": f"{instruction}\n{further}" if has_input else instruction}
    messages = [*_system(columns), *said, question, {"role": "assistant", "content": asked.completion}]
    return Instruction(Chat(_messages(messages), tools=_tools(columns), has_prompt=True), plain)


def _history(columns: Mapping[str, object]) -> list[tuple[Message, Message]]:
    """Earlier turns of an Alpaca row: [[asked, answered], ...]."""
    turns = _parsed(columns.get("history")) or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise UnusableRow(Reason.BAD_MESSAGES, "history is not a list of [question, answer]")
    return [({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in turns]


def _tokens(columns: Mapping[str, object]) -> Tokens:
    ids, labels = _parsed(columns["input_ids"]), _parsed(columns.get("labels"))
    labels = ids if labels is None else labels
    for name, values, lowest in (("input_ids", ids, 0), ("labels", labels, -100)):
        if not isinstance(values, list) or not all(type(v) is int and lowest <= v < 2**31 for v in values):
            raise UnusableRow(Reason.BAD_TOKENS, f"{name} is not a list of integers from {lowest} to 2147483647")
    if len(ids) != len(labels):
        raise UnusableRow(Reason.BAD_TOKENS, f"there are {len(ids)} input_ids and {len(labels)} labels")
    if any(-100 < label < 0 for label in labels):
        raise UnusableRow(
            Reason.BAD_TOKENS, f"the label {min(x for x in labels if x > -100)} is neither -100 nor an id"
        )
    return Tokens(ids, labels)
