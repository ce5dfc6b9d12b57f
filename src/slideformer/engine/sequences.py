"""Prompts and what they have come to, and what each pass of generation works on.

Prompts of a micro-batch are as long as its longest: the others are padded on the left, so that all rows end together
and a pass adds one column. What is padded is masked and has no position of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slideformer.engine.feed import Feed, Flat, MicroFeed, Slice, by_tile
from slideformer.engine.run import Run
from slideformer.errors import BadInput
from slideformer.layout import Layout
from slideformer.model.sampling import Chooser


@dataclass(slots=True)
class Row:
    """One prompt. number: its place among all prompts. new: its tokens so far, an end token included."""

    number: int
    prompt: tuple[int, ...]
    new: list[int] = field(default_factory=list)
    done: bool = False


class Sequences:
    """The rows of every micro-batch, and the tokens that the last pass chose for them."""

    def __init__(self, rows: Sequence[Sequence[Row]], *, end_ids: tuple[int, ...]) -> None:
        self.rows = [list(micro) for micro in rows]
        self.longest = [max(len(row.prompt) for row in micro) for micro in self.rows]
        self.num_passes = 0
        self._end_ids = frozenset(end_ids)
        self._chosen: list[list[int]] = []

    def take(self, tokens: list[list[int]]) -> list[tuple[int, int]]:
        """Put a token on the end of every row that is not done. Returns (number, token) of those."""
        self._chosen, self.num_passes = tokens, self.num_passes + 1
        taken = []
        for micro, chosen in zip(self.rows, tokens, strict=True):
            for row, token in zip(micro, chosen, strict=True):
                if not row.done:
                    row.new.append(token)
                    row.done = token in self._end_ids
                    taken.append((row.number, token))
        return taken

    def feed(self, layout: Layout) -> Feed:
        """Of the next pass: whole prompts in the first, a token a row afterwards. Not staged."""
        inputs = [self._inputs(micro) for micro in range(len(self.rows))]
        numels = [ids.numel() for ids, _, _ in inputs]
        rows, remapped = torch.unique(torch.cat([ids.reshape(-1) for ids, _, _ in inputs]), return_inverse=True)
        flat = Flat()
        micros = []
        for (ids, mask, positions), places in zip(inputs, remapped.split(numels), strict=True):
            shape = (ids.shape[0], ids.shape[1])
            none = Slice(0, (0,))
            at = flat.put(places, shape)
            masked = None if mask is None else flat.put(mask, (mask.shape[0], mask.shape[1]))
            micros.append(MicroFeed(at, none, none, masked, flat.put(positions, shape), None))
        row_slice = flat.put(rows)
        return Feed(
            flat=torch.cat(flat.parts),
            micro=tuple(micros),
            rows=rows,
            row_slice=row_slice,
            rows_by_tile=by_tile(rows, layout),
            padding_row=None,
            num_target_tokens=0,
            num_tokens=sum(numels),
        )

    def _inputs(self, micro: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """ids and positions [rows, new], and where rows are padded the mask [rows, all so far]."""
        rows, longest, generated = self.rows[micro], self.longest[micro], self.num_passes
        padding = torch.tensor([longest - len(row.prompt) for row in rows])
        columns = torch.arange(longest + generated)
        padded = bool(padding.any())
        mask = (columns[None, :] >= padding[:, None]).long() if padded else None
        positions = (columns[None, :] - padding[:, None]).clamp(min=0)
        if generated:
            return torch.tensor(self._chosen[micro])[:, None], mask, positions[:, -1:]
        # what stands in the padding is masked: a token that is there anyway asks for no other row of the table
        filled = [[row.prompt[0]] * (longest - len(row.prompt)) + list(row.prompt) for row in rows]
        return torch.tensor(filled), mask, positions


def rows_of(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[Row]:
    """Raises BadInput for a prompt without tokens, or with one that the model does not have."""
    rows = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput(f"prompt {number + 1} has no tokens, and a model goes on from something: give it some text")
        if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
            raise BadInput(
                f"prompt {number + 1} has token id {wrong[0]}, which is outside the vocabulary of {vocab_size}: "
                "use the tokenizer that belongs to the model"
            )
        rows.append(Row(number, tuple(prompt)))
    return rows


@dataclass(slots=True)
class PassRun(Run):
    """One pass. numbers, cached: of every micro-batch, the prompts in its rows, and the positions behind the pass.
    taken: (number, token) of every prompt that got one, once the pass is done."""

    chooser: Chooser | None = None
    numbers: tuple[tuple[int, ...], ...] = ()
    cached: tuple[int, ...] = ()
    taken: list[tuple[int, int]] = field(default_factory=list)


def pass_run(sequences: Sequences, chooser: Chooser, index: int) -> PassRun:
    """Pass `index` of these sequences, from 0. Its feed is made when it is its turn."""
    empty = torch.empty(0, dtype=torch.int64)
    feed = Feed(empty, (), empty, Slice(0, (0,)), (), None, 0, 0)
    cached = tuple(longest + index - 1 if index else 0 for longest in sequences.longest)
    numbers = tuple(tuple(row.number for row in micro) for micro in sequences.rows)
    return PassRun(feed, 0.0, trains=False, chooser=chooser, numbers=numbers, cached=cached)
