"""docs/data.md: its configs are valid, its rows are read as it says, and it names every setting and column there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slideformer.cli.config_file import load_config
from slideformer.config import COLUMNS
from slideformer.data.files import READERS
from slideformer.data.formats import NEEDED, RowFormat, _layout, parse_row
from slideformer.data.rows import RawRow

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_config_is_valid_and_every_key_is_canonical(text, tmp_path) -> None:
    (tmp_path / "docs.yaml").write_text(text)
    assert load_config(tmp_path / "docs.yaml").notices == ()


def test_every_row_is_usable_and_there_is_one_of_every_format() -> None:
    (text,) = blocks("json")
    found = set()
    for number, line in enumerate(text.splitlines(), start=1):
        row = RawRow("docs", number, json.loads(line))
        parse_row(row, RowFormat())
        found.add(_layout(row.columns, row, RowFormat()))
    assert found == NEEDED.keys()


def test_the_formats_stand_in_the_order_in_which_they_are_tried() -> None:
    table = TEXT.partition("## Layouts")[2].partition("```json")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(NEEDED)


def test_every_column_and_suffix_is_named() -> None:
    for name in (*COLUMNS, *READERS):
        if name != ".ndjson":  # another name for .jsonl
            assert f"`{name}`" in TEXT
