"""What a row is before and after it is understood, and why one may be left out. Values only.

A file that cannot be understood at all is a BadInput. A single row that cannot be used raises UnusableRow with a
reason from `Reason`; whether that ends the run or is only counted is decided by whoever asked for the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a row is left out, in the words of the report."""

    NO_ASSISTANT = "no assistant message"
    EMPTY_ANSWER = "empty answer"
    BAD_ROLE = "unknown role"
    NOT_TEXT = "content is not text"
    BAD_MESSAGES = "messages are not a list of {role, content}"
    BAD_TOOLS = "tools are not a list"
    BAD_TOKENS = "not token ids"
    EMPTY_TEXT = "empty text"
    TEMPLATE = "refused by the chat template"
    TOO_LONG = "too long"
    NO_TARGET = "no target tokens left"


class UnusableRow(ValueError):
    """One row that cannot be trained on. reason: what the report counts; the message adds what was found."""

    def __init__(self, reason: Reason, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a plain text file, which ends at a line's end. starts, ends: whether the file does so with it."""

    text: str
    starts: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in a file. name: of the file or hub dataset.

    number: from 1, its line; in lists and tables its place, where a CSV file's header is row 1. columns: the parsed
    object, or a stretch of plain text.
    """

    name: str
    number: int
    columns: Mapping[str, object] | Block

    @property
    def where(self) -> str:
        return f"{self.name}:{self.number}"


Message = Mapping[str, object]  # as written in the file: templates read more than role and content


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of plain text, of which everything is learned."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and its continuation."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. answers_from: index of the first message that is an answer and not a prompt. has_prompt: the row
    tells a prompt from its answer, and is no conversation as such."""

    messages: Sequence[Message]
    answers_from: int = 0
    tools: Sequence[object] | None = None
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """An Alpaca row: a conversation where the tokenizer has a chat template, else a prompt and its completion."""

    chat: Chat
    plain: Completion


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids that were made elsewhere. labels: not shifted, -100 where nothing is learned."""

    input_ids: Sequence[int]
    labels: Sequence[int]


Content = Text | Block | Completion | Chat | Instruction | Tokens
