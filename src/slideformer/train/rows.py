"""Rows that are given in Python, as the samples of a run: dicts as in a file, or token ids that need no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slideformer.data.dataset import samples_of

__all__ = ["Rows", "samples_of"]

Rows = Iterable[Mapping[str, object]]
