"""Settings of the data, and what a user says of one dataset, in all the ways that people write it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from slideformer.config.values import Settings

FormatName = Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens", "text"]
FORMAT_ALIASES = {
    **{"openai": "messages", "chatml": "messages", "conversations": "sharegpt", "instruction": "alpaca"},
    **{"completion": "prompt_completion", "input_ids": "tokens", "tokenized": "tokens"},
}
TYPES = {"chat_template": "auto", "completion": "text"}
"""Axolotl's `type` of a dataset, where it is not our word; alpaca and sharegpt are."""
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
    if isinstance(item, str):
        return {"path": item}
    if isinstance(item, Mapping) and "type" in item and "format" not in item:
        named = item["type"]
        return {**{k: v for k, v in item.items() if k != "type"}, "format": TYPES.get(str(named), named)}
    return item


class DataSettings(Settings):
    """What it is trained on."""

    dataset: tuple[DatasetSpec, ...] = ()
    dataset_text_field: str = "text"
    eval_dataset: dict[str, DatasetSpec] = {}  # by name; the metric is eval_NAME_loss, eval_loss for the name ""
    val_size: float = Field(0, ge=0)  # rows taken from the training rows; a share of them below 1
    max_length: int = Field(2048, ge=2)
    excess_length_strategy: Literal["drop", "truncate", "raise"] = "truncate"
    assistant_only_loss: bool = True
    completion_only_loss: bool = True
    packing: bool = False  # several samples a row, none of which sees another
    chat_template: str | None = None  # a jinja file; null: the tokenizer's own
    chat_template_kwargs: dict[str, JsonValue] = {}  # further variables of the template: {enable_thinking: false}
    max_samples: int | None = Field(None, ge=1)  # rows that are read of each dataset
    streaming: bool = False  # rows are read and encoded as they are needed; needs max_steps
    shuffle_buffer_size: int = Field(1000, ge=1)  # samples that are shuffled, and packed, at a time when streaming
    dataset_num_proc: int | None = Field(None, ge=1)  # processes that encode rows; null: this one
    dataloader_num_workers: int = Field(0, ge=0)  # taken, as other tools' configs have it, and without effect
    dataset_cache_dir: str | None = "auto"  # encoded rows are kept there; auto: ~/.cache/slideformer; null: nowhere
    strict: bool = False  # a row that cannot be used is an error, instead of counted and left out

    @field_validator("dataset", mode="before")
    @classmethod
    def _one_dataset(cls, value: object) -> object:
        return as_specs(value)

    @field_validator("eval_dataset", mode="before")
    @classmethod
    def _one_eval_dataset(cls, value: object) -> object:
        return as_named_specs(value)
