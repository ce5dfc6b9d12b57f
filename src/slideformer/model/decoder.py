"""A Hugging Face decoder-only model, unmodified, as units that run one at a time on weights somebody else holds.

The model lives on the meta device. A call binds the caller's tensors in the place of the parameters of one unit, runs
the model's own code, and lets go of them. What surrounds the blocks comes from the model's own forward too (parts.py).
Nothing here holds weights, moves data, or asks the device anything between blocks.
"""

from __future__ import annotations

import copy
import re
from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slideformer.layout import Layout, Param, Unit, UnitKind
from slideformer.model.build import ModelRefused, build, some
from slideformer.model.cache import CacheShape, PassCache
from slideformer.model.elementwise import apply_kernels
from slideformer.model.names import checkpoint_names
from slideformer.model.packed_attention import BY_SAMPLE, Packing, Samples, check_mask, packing_of, samples_of
from slideformer.model.packing import packing_known
from slideformer.model.parts import Binding, Call, Parts, find_parts
from slideformer.model.projection import Projection, projection_of
from slideformer.model.tail import find_tail, without_value

__all__ = ["Call", "Decoder", "ModelRefused", "Projection"]


class Decoder:
    """The units of one model. Calls do not overlap: one thread at a time (blocks are bound for the time of a call).

    config: as given (a copy); what is saved beside the weights.
    layout: table, glue?, block..., final?, output?; names are state-dict names.
    names: how names in checkpoint files may differ from the layout's. architecture: name of the model class.
    padding_idx: the id whose row gets no gradient from the input side, or None.
    kernels: op -> implementation, for the ops of the blocks that there are kernels for.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        tile_numel: int,
        attn_implementation: str = "auto",
        frozen: tuple[str, ...] = (),
        disable_dropout: bool = False,
        kernels: str = "torch",
        without_kernels: tuple[str, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Reads no weights and allocates nothing of the model's size.

        dtype: of parameters and compute, float32 or bfloat16. frozen: regular expressions, searched in parameter names;
        what they find is not trained. kernels, without_kernels: of the blocks' norms, residual additions, rotary
        embedding and gated MLPs, as in `apply_kernels`. device: where the glue's buffers (rotary tables) live and calls
        are made.
        Raises ModelRefused when the model cannot be trained right, or a pattern finds nothing, or all of them find all;
        BadInput when the kernels cannot be had.
        """
        device = torch.device(device)
        self.config = copy.deepcopy(config)
        self.dtype = dtype
        self._model = build(
            config, dtype=dtype, attn_implementation=attn_implementation, disable_dropout=disable_dropout, device=device
        )
        self.kernels = apply_kernels(self._model, kernels, device, without=without_kernels)
        self._by_sample = self._model.config._attn_implementation == BY_SAMPLE
        self.attn_implementation: str = "sdpa" if self._by_sample else self._model.config._attn_implementation
        self.architecture = type(self._model).__name__
        self._parts = find_parts(self._model, device)
        self.layout = _layout(self._model, self._parts, tile_numel, frozen)
        self.projection = projection_of(self._model.config, self._parts.bias_name)
        self.padding_idx: int | None = self._parts.padding_idx
        self.vocab_size, self.hidden_size = self._parts.table.weight.shape
        self.names = checkpoint_names(self._model)
        self._first_block = self.layout.blocks[0]
        self._table = Binding(self._model, [self._parts.table_name])
        self._glue = Binding(self._model, self._parts.glue_names)
        self._blocks = [Binding(self._model, names) for names in self._parts.block_names]
        family = self._model.config.model_type
        self._tails = [find_tail(self._model, family, names) for names in self._parts.block_names]
        self._final = Binding(self._model, self._parts.final_names)

    @property
    def module_config(self) -> PretrainedConfig:
        """The config the module really has: dropout 0, no cache, the attention implementation chosen."""
        return self._model.config

    def block_kind(self, index: int) -> str:
        """Of the block at `index` among the blocks: "full_attention" and the like, where the model tells them apart."""
        kinds = getattr(self._model.config, "layer_types", None)
        return "" if kinds is None else str(kinds[index])

    @property
    def num_positions(self) -> int | None:
        """Positions of a learned table (GPT-2; two more rows in OPT); None where positions are computed."""
        glue = self.layout.find(UnitKind.GLUE)
        most = getattr(self.config, "max_position_embeddings", None)
        params = () if glue is None or most is None else self.layout.units[glue].params
        return most if any(p.shape[0] in (most, most + 2) for p in params if len(p.shape) == 2) else None

    @cached_property
    def cache_shape(self) -> CacheShape:
        """What a block keeps between tokens. Raises ModelRefused for a model that keeps something else than keys and
        values."""
        return CacheShape(self._model.config)

    def pass_cache(self, length: int) -> PassCache:
        """For one pass of one micro-batch that has `length` positions behind it."""
        return PassCache(self.cache_shape, len(self.layout.blocks), length)

    def views(self, unit: int, flat: torch.Tensor, *, requires_grad: bool = False) -> dict[str, torch.Tensor]:
        """Parameters of a unit by name, as views of its flat vector. `flat` may be longer (a slot); it needs no grad.

        requires_grad: make the trainable ones leaves that collect a gradient.
        """
        views, start = {}, 0
        for param in self.layout.units[unit].params:
            view = flat.detach()[start : start + param.numel].view(param.shape)
            views[param.name] = view.requires_grad_(requires_grad and param.trainable)
            start += param.numel
        return views

    def embed(
        self,
        rows: torch.Tensor,
        glue: dict[str, torch.Tensor],
        ids: torch.Tensor,
        *,
        padding_row: int | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packing: Packing | None = None,
        cache: PassCache | None = None,
    ) -> tuple[torch.Tensor, Call]:
        """What the first block gets, and what all blocks are called with: the model's own forward up to its blocks.

        rows: [n, H], gathered rows of the table. ids: [B, S] int64, indices into `rows`. padding_row: the row of
        `padding_idx` among them, which gets no gradient; None when it is not there. glue: the glue unit's parameters,
        empty if it has none. attention_mask: [B, S], 1 = real; right padding needs none. position_ids: [B, S]; the
        samples packed in a row are those between restarts. packing: `packing_of` them, from the host; without it a mask
        of [B, S, S] keeps them apart on a GPU. cache: from `pass_cache`, for `forward_cached`; attention_mask is then
        that of the positions before, too, [B, length + S]. Differentiable in rows and glue; the caller sets the mode.
        Waits for the device only if an attention_mask is given, or where the model does (rope type "dynamic"). Raises
        BadInput for packed rows whose mask would be too large.
        Returns hidden [B, S, H].
        """
        self._parts.table.padding_idx = padding_row
        self._table.bind({self._parts.table_name: rows})
        self._glue.bind(glue)
        try:
            if cache is not None:
                return self._parts.recorders.run(
                    cache, input_ids=ids, attention_mask=attention_mask, position_ids=position_ids
                )
            with packing_known(position_ids is not None, self._samples(position_ids, attention_mask, packing)):
                return self._parts.recorders.run(
                    input_ids=ids, attention_mask=attention_mask, position_ids=position_ids
                )
        finally:
            self._table.release()
            self._glue.release()

    def _samples(
        self, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, packing: Packing | None
    ) -> Samples | None:
        if position_ids is None or attention_mask is not None:
            return None
        if self._by_sample and packing is None and position_ids.is_cpu:
            packing = packing_of(position_ids)
        if self._by_sample and packing is not None:
            return samples_of(position_ids, packing)
        itemsize = self.dtype.itemsize if self.attn_implementation == "eager" else 1
        check_mask(tuple(position_ids.shape), itemsize=itemsize, implementation=self.attn_implementation)
        return None

    def forward(self, unit: int, params: dict[str, torch.Tensor], hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """Run one block. unit: its index in the layout. params: from `views`. hidden: [B, S, H]. The caller sets the
        grad mode; nothing is saved here.
        """
        index = unit - self._first_block
        binding = self._blocks[index]
        binding.bind(params)
        try:
            output = self._parts.block_forwards[index](hidden, *call.args[index], **call.kwargs[index])
        finally:
            binding.release()
        return output[0] if self._parts.recorders.returns_tuple else output

    def forward_cached(
        self, unit: int, params: dict[str, torch.Tensor], hidden: torch.Tensor, call: Call, memory: torch.Tensor
    ) -> torch.Tensor:
        """Run one block on positions that follow others, without a graph. call: from `embed` with a cache. memory:
        flat, what the block keeps: `cache_shape.numel` elements for each position and row; those of this call are
        appended."""
        assert call.cache is not None, "the call was made without a cache"
        call.cache.open(memory)
        try:
            return self.forward(unit, params, hidden, call)
        finally:
            call.cache.shut()

    def rerun(self, unit: int, params: dict[str, torch.Tensor], hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """`forward` for the sake of its graph: gradients through the result are right, its value is undefined."""
        tail = self._tails[unit - self._first_block]
        return without_value(tail, lambda: self.forward(unit, params, hidden, call))

    def final(self, params: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The final norm, [..., H] -> [..., H]; `hidden` itself where the model has none. params: the final unit's."""
        if self._parts.final is None:
            return hidden
        self._final.bind(params)
        try:
            return self._parts.final(hidden)
        finally:
            self._final.release()


def _layout(model: PreTrainedModel, parts: Parts, tile_numel: int, frozen: tuple[str, ...]) -> Layout:
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    is_frozen = _frozen(list(shapes), frozen)

    def unit(name: str, kind: UnitKind, names: list[str]) -> list[Unit]:
        # Decay is for matrices: norms and biases are kept where they are.
        params = [Param(n, shapes[n], decay=len(shapes[n]) >= 2, trainable=n not in is_frozen) for n in names]
        return [Unit(name, kind, tuple(params))] if params else []

    bias = [] if parts.bias_name is None else [parts.bias_name]
    output = [] if parts.output_name is None else [parts.output_name]
    units = unit("table", UnitKind.TABLE, [parts.table_name])
    units += unit("glue", UnitKind.GLUE, parts.glue_names)
    for index, names in enumerate(parts.block_names):
        units += unit(f"block.{index}", UnitKind.BLOCK, names)
    units += unit("final", UnitKind.FINAL, parts.final_names + bias)
    units += unit("output", UnitKind.OUTPUT, output)
    return Layout(tuple(units), tile_numel, tied=parts.output_name is None)


def _frozen(names: list[str], patterns: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        try:
            hits = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ModelRefused(
                f"frozen pattern {pattern!r} is not a regular expression ({error}): correct it."
            ) from None
        if not hits:
            raise ModelRefused(
                f"frozen pattern {pattern!r} matches none of the model's {len(names)} parameters, which are named "
                f"like {some(set(names))}: correct or remove it."
            )
        found |= hits
    if found == set(names):
        raise ModelRefused(
            f"frozen patterns {', '.join(map(repr, patterns))} match all {len(names)} parameters, so nothing would be "
            "trained: narrow them."
        )
    return found
