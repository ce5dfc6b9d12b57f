"""Answers a question that transformers would ask the device: are several samples packed into one row?

Before it makes a mask, transformers looks whether positions restart inside a row, and waits for the device to know.
The launching thread would stand still there until all earlier work is done, once per mask and micro-batch. The caller
knows: no positions given means none restart; given ones are taken to restart, and the mask is made from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from transformers import masking_utils

_own = masking_utils.find_packed_sequence_indices
_packed: ContextVar[bool | None] = ContextVar("packed", default=None)  # per thread; None: ask the device


def _find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
    packed = _packed.get()
    if packed is None:
        return _own(position_ids)
    if not packed:
        return None
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


@contextmanager
def packing_known(packed: bool) -> Iterator[None]:
    """Inside, in this thread, masks are made without waiting for the device. Can go when masks can be asked for so."""
    token = _packed.set(packed)
    masking_utils.find_packed_sequence_indices = _find_packed_sequence_indices
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = _own
        _packed.reset(token)
