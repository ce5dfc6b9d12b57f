"""Bytes of text generation: buffers of its passes, and the budget of a machine that only generates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from slideformer.layout import Layout
from slideformer.memory.budget import Budget, _term
from slideformer.memory.buffers import BatchShape, Need, Tier, needs, num_rows
from slideformer.memory.state import home_nbytes, state_nbytes
from slideformer.schedule import Buffer, Place, Plan


@dataclass(frozen=True, slots=True)
class PassShape:
    """The largest passes: micro_batches of `rows` prompts of up to `prompt_length` tokens, which may become `length`
    with what is generated. cache_numel: elements that a block keeps for a token of a row."""

    micro_batches: int
    rows: int
    prompt_length: int
    length: int
    hidden: int
    dtype: torch.dtype
    cache_numel: int

    @property
    def first(self) -> BatchShape:
        """Of the pass over whole prompts."""
        return BatchShape(self.micro_batches, self.rows, self.prompt_length, self.hidden, self.dtype)

    @property
    def held_numel(self) -> int:
        """Keys and values of one block and micro-batch."""
        return self.length * self.rows * self.cache_numel

    def covers(self, other: PassShape) -> bool:
        """Whether buffers for this are large enough for the other."""
        return (
            self.micro_batches * self.rows >= other.micro_batches * other.rows
            and self.prompt_length >= other.prompt_length
            and self.length >= other.length
        )


def pass_needs(plans: Iterable[Plan], layout: Layout, shape: PassShape) -> dict[Buffer, Need]:
    """What every buffer of these passes takes."""
    return {b: _need(b, need, layout, shape) for b, need in needs(plans, layout, shape.first).items()}


def _need(buffer: Buffer, common: Need | None, layout: Layout, shape: PassShape) -> Need:
    """common: what a training step with as many tokens would give it."""
    match buffer.place:
        case Place.SEQUENCES | Place.FEED:
            return Need(Tier.CELL)
        case Place.CACHE | Place.CACHE_RING:
            return Need(Tier.DEVICE, shape.held_numel, shape.dtype)
        case Place.CACHE_HOST:
            return Need(Tier.LOCKED, shape.held_numel, shape.dtype)
        case Place.TOKENS:
            return Need(Tier.DEVICE, shape.rows, torch.int64)
        case Place.TOKENS_HOST:
            return Need(Tier.LOCKED, shape.rows, torch.int64)
        case Place.BATCH:  # ids and positions, and a mask of all positions so far
            rows = shape.micro_batches * shape.rows
            whole, later = 3 * rows * shape.prompt_length, rows * (shape.length + 2)
            return Need(Tier.DEVICE, max(whole, later) + num_rows(layout, shape.first), torch.int64)
    assert common is not None, f"nobody says what {buffer} takes"
    return common


def pass_budget(
    found: Mapping[Buffer, Need], layout: Layout, *, resident: Iterable[int], keep_residual: bool
) -> Budget:
    """What these buffers take, and a state that holds weights alone. layout: one that trains nothing."""
    host = dict(state_nbytes(layout, keep_residual=keep_residual, resident=resident))
    state = frozenset(host)
    device: dict[str, int] = {}
    if homes := sum(home_nbytes(layout, u, keep_residual=keep_residual) for u in resident):
        device["resident weights"] = homes
    for buffer, need in found.items():
        if need.tier in (Tier.DEVICE, Tier.LOCKED):
            terms = device if need.tier is Tier.DEVICE else host
            term = _NAMES.get(buffer.place) or _term(buffer, layout)
            terms[term] = terms.get(term, 0) + need.nbytes
    return Budget(device, {t: n for t, n in host.items() if n}, state)


_NAMES = {
    Place.CACHE: "keys and values",
    Place.CACHE_RING: "keys and values",
    Place.CACHE_HOST: "keys and values",
    Place.TOKENS: "tokens",
    Place.TOKENS_HOST: "tokens",
}
