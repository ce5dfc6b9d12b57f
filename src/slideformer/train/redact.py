"""Keeps secrets out of what is written or published: run.json, trainer.json, the model card, error texts in them.

A token is known by its form, by being the value of an environment variable whose name says so, or by standing where a
web address has a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
MIN_LENGTH = 8  # a shorter value of TOKEN=1 would blank out half of a file
_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[A-Z0-9]{16}|xox[abps]-[A-Za-z0-9-]{10,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
)
_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def redacted(value: object) -> object:
    """The same JSON value with every secret in its texts, keys of mappings included, replaced by ***."""
    return _redacted(value, _secrets(os.environ))


def redacted_text(text: str) -> str:
    return _text(text, _secrets(os.environ))


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Values that variables with telling names have, longest first, so that no part of one is left."""
    found = {value for name, value in environment.items() if _NAMES.search(name) and len(value) >= MIN_LENGTH}
    return sorted(found, key=len, reverse=True)


def _redacted(value: object, secrets: list[str]) -> object:
    if isinstance(value, str):
        return _text(value, secrets)
    if isinstance(value, Mapping):
        return {_redacted(key, secrets): _redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, secrets) for item in value]
    return value


def _text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        if not os.path.exists(secret):  # a variable may name the file that holds the token: a path is no secret
            text = text.replace(secret, HIDDEN)
    return _PASSWORD.sub(HIDDEN, _FORMS.sub(HIDDEN, text))
