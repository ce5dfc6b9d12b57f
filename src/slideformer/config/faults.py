"""What is wrong with settings, in one sentence that says what was found and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from slideformer.config.data import DatasetSpec
from slideformer.config.spellings import ALIASES, FOREIGN
from slideformer.errors import BadInput


class WrongSettings(BadInput):
    """Settings that a config does not take. keys: those that the sentence is about."""

    def __init__(self, sentence: str, keys: tuple[str, ...]) -> None:
        super().__init__(sentence)
        self.keys = keys


def wrong_settings(error: ValidationError, known: Iterable[str]) -> WrongSettings:
    """The first of pydantic's complaints. known: the keys there are."""
    first, fields = error.errors()[0], list(known)
    place = first["loc"]
    if not place:  # a rule between fields: its sentence names the keys
        text = str(first["ctx"]["error"]) if "ctx" in first else _plain(first)
        return WrongSettings(text, tuple(name for name in fields if re.search(rf"\b{name}\b", text)))
    name = str(place[0])
    if first["type"] == "extra_forbidden" and len(place) == 1:
        return WrongSettings(_unknown_here(name, fields), (name,))
    if first["type"] == "extra_forbidden":
        return WrongSettings(f"{name}: {unknown(str(place[-1]), DatasetSpec.model_fields)}", (name,))
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[1:] if _is_visible(part))
    text = " or ".join(_plain(e) for e in error.errors() if e["loc"][:1] == place[:1])
    found = "" if first["type"] == "value_error" else f"found {_short(first['input'])}, "
    return WrongSettings(f"{name}{inner}: {found}{text}", (name,))


def unknown(key: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """That a key is none of those known, and which is near, among `also` too."""
    near = get_close_matches(key, [*known, *also], n=1)
    return f"unknown key {key}" + (f": did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}")


def _unknown_here(key: str, known: list[str]) -> str:
    if key in FOREIGN:
        return f"{key}: {FOREIGN[key].says}; leave it out"
    if ALIASES.get(key) in known:
        return f"unknown key {key}: its name is {ALIASES[key]}"
    return unknown(key, known)


def _short(value: object) -> str:
    """As Python writes it, cut: with YAML's aliases a few lines make a value whose text fills the memory."""
    if value is None:
        return "nothing"
    short = Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, 200, 200
    return short.repr(value)


def _is_visible(part: int | str) -> bool:
    """Whether a part of pydantic's location is a place in the value, not the name of a member of a union."""
    return isinstance(part, int) or part in DatasetSpec.model_fields


def _plain(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = error["msg"].partition(", unable to")[0].replace("Input should", "should")
    return f"{text[0].lower()}{text[1:]}"
