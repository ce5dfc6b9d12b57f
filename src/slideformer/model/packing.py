"""Answers a question that transformers would ask the device: are several samples packed into one row?

Before it makes a mask, transformers looks whether positions restart inside a row, and waits for the device to know.
The launching thread would stand still there until all earlier work is done, once per mask and micro-batch. The caller
knows: no positions given means none restart; given ones are taken to restart, and the mask is made from them, or, where
attention works sample by sample, the samples are handed on in the place of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from transformers import masking_utils

_own = masking_utils.find_packed_sequence_indices
_packed: ContextVar[bool | None] = ContextVar("packed", default=None)  # per thread; None: ask the device
_samples: ContextVar[object | None] = ContextVar("samples", default=None)


def samples_in_hand() -> object | None:
    """What `packing_known` was given for this thread."""
    return _samples.get()


def _find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
    packed = _packed.get()
    if packed is None:
        return _own(position_ids)
    if not packed or _samples.get() is not None:
        return None
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


@contextmanager
def packing_known(packed: bool, samples: object | None = None) -> Iterator[None]:
    """Inside, in this thread, masks are made without waiting for the device. samples: for an attention that takes them
    in the place of a mask. Can go when masks can be asked for so."""
    tokens = (_packed, _packed.set(packed)), (_samples, _samples.set(samples))
    masking_utils.find_packed_sequence_indices = _find_packed_sequence_indices
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = _own
        for variable, token in tokens:
            variable.reset(token)
