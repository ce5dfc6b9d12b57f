"""Keys and values of one micro-batch in memory of the caller's, in the form that a model's own code expects.

transformers' cache is a list of layers, one a block, each of which appends what it is given and returns all that there
is. Here one layer serves whichever block is at work: it writes the new columns into the caller's memory, in place, and
returns views of it. Columns of all rows lie side by side (position first), so that the newest ones, and all up to them,
are one contiguous piece each: what crosses the link is one copy. A sliding window is kept by the mask, not by the
memory: a block that has one holds every position, too.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from slideformer.model.build import ModelRefused

HELD = ("full_attention", "sliding_attention")
"""Layer types whose memory is keys and values of every position."""


class CacheShape:
    """What a block keeps for one token of one row: `heads` keys and as many values of `size` each."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Raises ModelRefused for a model that keeps something else."""
        kinds = set(getattr(config, "layer_types", None) or HELD[:1])
        if other := sorted(kinds - {*HELD}):
            raise ModelRefused(
                f"{config.model_type} has blocks of type {', '.join(other)}, which keep something else than keys and "
                f"values between tokens; text is generated with {' and '.join(HELD)} only: choose another model."
            )
        self.heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def numel(self) -> int:
        return 2 * self.heads * self.size

    def view(self, memory: torch.Tensor, rows: int) -> torch.Tensor:
        """[positions, 2, rows, heads, size] of flat memory; what does not make a whole position is left out."""
        positions = memory.numel() // (rows * self.numel)
        return memory[: positions * rows * self.numel].view(positions, 2, rows, self.heads, self.size)


class _Layer(DynamicLayer):
    """The block at work. Takes the place of every layer of a model's cache."""

    def __init__(self, shape: CacheShape, length: int) -> None:
        super().__init__()
        self._shape, self._length = shape, length
        self._memory: torch.Tensor | None = None

    def open(self, memory: torch.Tensor | None) -> None:
        self._memory = memory

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        rows, heads, new, size = key_states.shape
        if (heads, size) != (shape.heads, shape.size) or value_states.shape != key_states.shape:
            raise ModelRefused(
                f"the model keeps keys {list(key_states.shape)} and values {list(value_states.shape)}, and by its "
                f"config there are {shape.heads} heads of {shape.size} of both: text cannot be generated with it here."
            )
        assert self._memory is not None, "a block asks for its keys and values outside of its call"
        end = self._length + new
        held = shape.view(self._memory, rows)
        if end > held.shape[0]:
            raise AssertionError(f"{end} positions, and there is memory for {held.shape[0]}")
        columns = held[self._length : end]
        columns[:, 0].copy_(key_states.permute(2, 0, 1, 3))
        columns[:, 1].copy_(value_states.permute(2, 0, 1, 3))
        keys, values = (held[:end, i].permute(1, 2, 0, 3) for i in range(2))
        return keys, values

    def get_seq_length(self) -> int:
        return self._length


class PassCache(Cache):
    """What a model's own forward takes as its cache for one pass of one micro-batch. length: positions before it."""

    def __init__(self, shape: CacheShape, num_blocks: int, length: int) -> None:
        self._layer = _Layer(shape, length)
        super().__init__(layers=[self._layer] * num_blocks)

    def open(self, memory: torch.Tensor) -> None:
        """The next block that asks finds its keys and values in `memory`, flat, and appends to them there."""
        self._layer.open(memory)

    def shut(self) -> None:
        self._layer.open(None)
