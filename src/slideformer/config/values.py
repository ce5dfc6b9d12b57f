"""What every setting has in common: how a value is read as people write it in YAML and on command lines."""

from __future__ import annotations

import re
from typing import Annotated, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo, field_validator

SIZE_UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MIN_SIZE_NBYTES = 2**20  # a bare number below this was meant as GiB: ask, do not guess
NULL_MEANS = {
    "max_steps": -1,
    "max_grad_norm": 0.0,
    "val_size": 0,
    "per_device_eval_batch_size": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
    "resume_from_checkpoint": False,
    "lr_scheduler_kwargs": {},
    "chat_template_kwargs": {},
}


class Settings(BaseModel):
    """A part of TrainConfig: fields, and what each of them takes by itself. Rules between fields are in `rules`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: object, info: ValidationInfo) -> object:
        """What YAML and command lines make of numbers and words: `no` for "no", "1e3" for 1000, yes for 1."""
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        if isinstance(value, str) and "\0" in value:
            raise ValueError("found text with a NUL byte in it, which no path and no name can have")
        if isinstance(value, bool) and not {bool, True, False} & kinds:
            if value is False and "no" in kinds:
                return "no"
            raise ValueError(f"found {'yes' if value else 'no'}, which is not a value of {info.field_name}")
        if value is None and info.field_name in NULL_MEANS:
            return NULL_MEANS[info.field_name]
        if int in kinds and isinstance(value, str):
            number = as_number(value)
            return int(number) if number is not None and number.is_integer() else value
        return value


def as_nbytes(value: object) -> object:
    """Bytes of "24GiB" or of a number of bytes; None stays. Raises ValueError."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= MIN_SIZE_NBYTES):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*((?:[KMGT]i?)?B)\s*", str(value), re.IGNORECASE)
    number = as_number(match[1]) if match else None
    if match is None or number is None:
        raise ValueError(f"found {value!r}, which is no size: write 24GiB (or MiB, GB, MB)")
    return int(number * SIZE_UNITS[match[2].upper()])


def as_size(nbytes: int) -> int | str:
    """What `as_nbytes` reads as these bytes."""
    return nbytes if nbytes >= MIN_SIZE_NBYTES else f"{nbytes}B"


Nbytes = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(as_nbytes, json_schema_input_type=Annotated[int, Field(ge=1)] | str),
    PlainSerializer(as_size),
]
"""A setting that is a size: bytes once it is read, and written so that it can be read again."""

NbytesOrZero = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(
        lambda value: value if value == 0 else as_nbytes(value),
        json_schema_input_type=Annotated[int, Field(ge=0)] | str,
    ),
    PlainSerializer(lambda nbytes: as_size(nbytes) if nbytes else 0),
]
"""The same where there may be none: 0."""


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _kinds(annotation: object) -> set[object]:
    """The leaf types and literal values of an annotation: {bool, "auto"} for `Literal["auto"] | bool`."""
    inner = get_args(annotation)
    return set().union(*(_kinds(a) for a in inner)) if inner else {annotation}
