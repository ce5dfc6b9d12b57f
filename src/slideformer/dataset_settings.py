"""What a user says of one dataset, in all the ways that people write it, and the rules of the settings for data.

Part of `config`, which holds the fields. Standard library and pydantic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

FormatName = Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens", "text"]
FORMAT_ALIASES = {
    **{"openai": "messages", "chatml": "messages", "conversations": "sharegpt", "instruction": "alpaca"},
    **{"completion": "prompt_completion", "input_ids": "tokens", "tokenized": "tokens"},
}
COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system"),
    *("tools", "text", "input_ids", "labels"),
)
"""What columns are called here; `columns` says what a file calls them."""


class DatasetSpec(BaseModel):
    """One dataset: a file, a folder of files, or an id on the Hugging Face hub.

    name, split: of a dataset on the hub; split also of a folder whose files are named by split. format: auto: by the
    columns. columns: ours -> the file's. weight: how often each row comes up in an epoch; 0.5 takes another half each
    time. When streaming, weights are the shares of the rows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str = Field(min_length=1)
    name: str | None = None
    split: str | None = None
    format: FormatName = "auto"
    columns: dict[str, str] = {}
    weight: float = Field(1.0, gt=0)

    @field_validator("format", mode="before")
    @classmethod
    def _format_of_another_tool(cls, value: object) -> object:
        return "auto" if value is None else FORMAT_ALIASES.get(str(value), value)

    @field_validator("columns", mode="before")
    @classmethod
    def _known_columns(cls, value: object) -> object:
        for name in value if isinstance(value, dict) else ():
            if name not in COLUMNS:
                near = get_close_matches(str(name), COLUMNS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COLUMNS)}"
                raise ValueError(
                    f"{name} is no column that is used ({hint}); write OURS: YOURS, as in prompt: question"
                )
        return {} if value is None else value


def as_specs(value: object) -> object:
    """A path, a mapping, or a list of both."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [_as_spec(item) for item in items]


def as_named_specs(value: object) -> object:
    """One dataset, or several by name. A mapping with `path` is one."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and "path" not in value:
        return {name: _as_spec(item) for name, item in value.items()}
    return {"": _as_spec(value)}


def _as_spec(item: object) -> object:
    return {"path": item} if isinstance(item, str) else item


def data_rules(
    *,
    streaming: bool,
    max_steps: int,
    val_size: float,
    has_eval_dataset: bool,
    eval_strategy: str,
    save_strategy: str,
) -> list[tuple[bool, str]]:
    """Rules between the fields for data, as (is it broken, what to say)."""
    strategies = {"eval_strategy": eval_strategy, "save_strategy": save_strategy}
    epochs = [key for key, strategy in strategies.items() if strategy == "epoch"]
    return [
        (
            streaming and max_steps < 0,
            "streaming is true, so nobody knows how many rows there are: set max_steps",
        ),
        (
            streaming and val_size > 0,
            "streaming is true, so val_size cannot be taken out of the rows: give eval_dataset",
        ),
        (
            streaming and bool(epochs),
            f"streaming is true, so there are no epochs, but {' and '.join(epochs)} is epoch: set it to steps",
        ),
        (
            has_eval_dataset and val_size > 0,
            "eval_dataset and val_size are both given: evaluate on files, or on rows taken from the training rows",
        ),
        (
            val_size >= 1 and not float(val_size).is_integer(),
            f"val_size is {val_size:g}: give a number of rows, or a share below 1",
        ),
    ]
