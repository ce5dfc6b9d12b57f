"""Rows in local files: which layouts there are, what a usable row is, and where each row stands.

A file that cannot be understood at all is a BadInput. A single row that cannot be used raises UnusableRow with a
reason from `Reason`; whether that ends the run or is only counted is decided by whoever asked for the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from slideformer.errors import BadInput

ROLES = ("system", "developer", "user", "assistant", "tool")
LAYOUTS = """{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, \
{"prompt": ..., "completion": ...} (both text or both lists of messages), or {"text": ...}"""


class Reason(StrEnum):
    """Why a row is left out, in the words of the report."""

    NO_ASSISTANT = "no assistant message"
    EMPTY_ANSWER = "empty answer"
    BAD_ROLE = "unknown role"
    NOT_TEXT = "content is not text"
    BAD_MESSAGES = "messages are not a list of {role, content}"
    EMPTY_TEXT = "empty text"
    TEMPLATE = "refused by the chat template"
    TOO_LONG = "too long"
    NO_TARGET = "no target tokens left"


class UnusableRow(ValueError):
    """One row that cannot be trained on. reason: what the report counts; the message adds what was found."""

    def __init__(self, reason: Reason, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason


Message = Mapping[str, object]  # as written in the file: templates read more than role and content


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of plain text. document: a whole file, to be cut into pieces instead of shortened."""

    text: str
    document: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and its continuation."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. answers_from: index of the first message that is an answer and not a prompt."""

    messages: Sequence[Message]
    answers_from: int = 0
    tools: Sequence[object] | None = None


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in a file. number: its line, from 1. columns: the parsed object, or the whole of a .txt."""

    path: Path
    number: int
    columns: Mapping[str, object] | str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def read_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a .jsonl file (empty lines skipped), or the one document of a .txt file.

    Raises BadInput: no such file, a suffix that is not known, not UTF-8, a line that is not a JSON object.
    """
    if not path.is_file():
        what = "is a folder: name its files one by one" if path.is_dir() else "does not exist"
        raise BadInput(f"the data file {path} {what}")
    if path.suffix not in (".jsonl", ".txt"):
        raise BadInput(f"the data file {path} ends in {path.suffix or 'nothing'}; accepted are .jsonl and .txt")
    try:
        if path.suffix == ".txt":
            yield RawRow(path, 1, path.read_text(encoding="utf-8"))
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield RawRow(path, number, _object(line.rstrip("\r\n"), f"{path}:{number}"))
    except UnicodeDecodeError as error:
        raise BadInput(f"the data file {path} is not UTF-8: {error}") from None


def _object(line: str, where: str) -> Mapping[str, object]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected a JSON object in each line, found a {type(value).__name__}")
    return value


def parse_row(row: RawRow, *, text_field: str) -> Text | Completion | Chat:
    """The content of a row, by the columns it has.

    Raises BadInput when no layout fits its columns, UnusableRow when a layout fits but the values do not.
    """
    columns = row.columns
    if isinstance(columns, str):
        return Text(_text(columns, "the file"), document=True)
    if text_field in columns and (text_field != "text" or not {"messages", "prompt"} & columns.keys()):
        return Text(_text(columns[text_field], text_field))
    if "messages" in columns:
        return Chat(_messages(columns["messages"]), tools=_tools(columns))
    if "prompt" in columns and "completion" in columns:
        return _prompt_and_completion(columns)
    raise BadInput(
        f"{row.where}: no layout fits its columns ({', '.join(columns) or 'none'}): accepted are {LAYOUTS}"
        + (f", with dataset_text_field: {text_field} in place of text" if text_field != "text" else "")
        + "; dataset_text_field names another text column"
    )


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UnusableRow(Reason.NOT_TEXT, f"{name} is a {type(value).__name__}")
    if not value.strip():
        raise UnusableRow(Reason.EMPTY_TEXT, f"{name} is empty")
    return value


def _messages(value: object) -> Sequence[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UnusableRow(Reason.BAD_MESSAGES, f"found {json.dumps(value)[:80]}")
    for index, message in enumerate(value):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UnusableRow(Reason.BAD_ROLE, f"messages[{index}] has role {role!r}, allowed are {', '.join(ROLES)}")
        calls = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not (content is None and calls):
            raise UnusableRow(Reason.NOT_TEXT, f"messages[{index}].content is a {type(content).__name__}")
        if role == "assistant" and not calls and not content.strip():
            raise UnusableRow(Reason.EMPTY_ANSWER, f"messages[{index}] says nothing")
    if not any(message["role"] == "assistant" for message in value):
        raise UnusableRow(Reason.NO_ASSISTANT, f"found roles {', '.join(m['role'] for m in value)}")
    return value


def _tools(columns: Mapping[str, object]) -> Sequence[object] | None:
    tools = columns.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UnusableRow(Reason.BAD_MESSAGES, f"tools is a {type(tools).__name__}, not a list")
    return tools


def _prompt_and_completion(columns: Mapping[str, object]) -> Completion | Chat:
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return Chat(_messages([*prompt, *completion]), answers_from=len(prompt), tools=_tools(columns))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise UnusableRow(Reason.NOT_TEXT, f"{name} is a {type(value).__name__}")
    if not completion.strip():
        raise UnusableRow(Reason.EMPTY_ANSWER, "completion is empty")
    return Completion(prompt, completion)
