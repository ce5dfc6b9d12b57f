"""Attention of rows that hold several samples, sample by sample: no S x S mask, and no work between samples.

On a GPU torch's variable-length flash attention does it, on a CPU its scaled_dot_product_attention, one sample after
the other. What a sample is comes from positions that begin anew; how many there are and how long the longest is, the
host says, so that nothing waits for the device. Without packing it is transformers' "sdpa".
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slideformer.errors import BadInput
from slideformer.model.packing import samples_in_hand

BY_SAMPLE = "slideformer_by_sample"
MAX_HEAD_DIM = 256  # of torch's flash attention
# Of one micro-batch's mask. 32,768 tokens in a row take it all; their eager scores would be 2 GiB a head.
MAX_MASK_NBYTES = 1 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Packing:
    """What the host knows of a packed micro-batch. starts: first token of each sample among all its tokens, rows one
    behind the other, padding a sample of its own; and then their number."""

    starts: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Samples:
    """starts: the packing's, int32, on the device. window: tokens that a query sees, itself counted in; None: all."""

    packing: Packing
    starts: torch.Tensor
    window: int | None = None


def packing_of(position_ids: torch.Tensor) -> Packing:
    """Of int64 [B, S] on the CPU. A sample begins where a row does, and wherever a position is not the last one's
    successor."""
    starts = _begins(position_ids).flatten().nonzero().flatten().tolist()
    return Packing((*starts, position_ids.numel()))


def samples_of(position_ids: torch.Tensor, packing: Packing) -> Samples:
    """Of int64 [B, S] on any device, without a wait: counted there once more. packing: of the same positions."""
    numel = position_ids.numel()
    sample = _begins(position_ids).flatten().cumsum(0) - 1
    tokens = torch.arange(numel, device=position_ids.device)
    starts = torch.full((len(packing.starts),), numel, device=position_ids.device)
    starts.scatter_reduce_(0, sample, tokens, "amin")
    return Samples(packing, starts.int())


def _begins(position_ids: torch.Tensor) -> torch.Tensor:
    steps = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1])  # a row's first step is 0
    return steps != 1


def works_by_sample(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed rows of a model that may use sdpa can be worked on sample by sample."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return device.type == "cpu" or (dtype in (torch.float16, torch.bfloat16) and head_dim <= MAX_HEAD_DIM)


def register() -> None:
    """Make BY_SAMPLE known to transformers. Any number of times."""
    AttentionInterface.register(BY_SAMPLE, attention_by_sample)
    AttentionMaskInterface.register(BY_SAMPLE, mask_by_sample)


def check_mask(shape: tuple[int, int], *, itemsize: int, implementation: str) -> None:
    """For packed rows [B, S] that need a mask: say so, once. Raises BadInput where it takes over MAX_MASK_NBYTES."""
    rows, length = shape
    nbytes = rows * length * length * itemsize
    if nbytes > MAX_MASK_NBYTES:
        raise BadInput(
            f"packed rows of {length} tokens need a mask of {nbytes / 2**20:,.0f} MiB with {implementation} attention, "
            f"at most {MAX_MASK_NBYTES / 2**20:,.0f} are made: lower max_length or per_device_train_batch_size, set "
            "packing: false, or use attn_implementation: auto"
        )
    _notice(
        f"packed rows are kept apart by a mask of max_length x max_length with {implementation} attention; "
        "attn_implementation: auto needs none, where a model's scores are not soft-capped"
    )


@cache
def _notice(text: str) -> None:
    log.warning("%s", text)


def mask_by_sample(*args: object, **kwargs: object) -> torch.Tensor | Samples | None:
    """The samples in hand, in the place of a mask; without any, the mask that sdpa would get."""
    samples = samples_in_hand()
    if not isinstance(samples, Samples):
        return sdpa_mask(*args, **kwargs)
    if kwargs.get("use_vmap") or not kwargs.get("allow_is_causal_skip", True):
        raise BadInput(
            "this model's attention is more than causal, and packed rows are only worked on sample by sample where it "
            "is not: set attn_implementation: sdpa, or packing: false"
        )
    window = kwargs.get("local_size")
    assert window is None or isinstance(window, int)
    return replace(samples, window=window)


def attention_by_sample(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Samples | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. query: [B, heads, S, D], key, value: [B, kv_heads, S, D]; [B, S, heads,
    D] comes back."""
    if not isinstance(attention_mask, Samples):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("dropout") or kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        raise BadInput(
            "this model's attention has dropout, soft-capped scores or a position bias, and packed rows are only "
            "worked on sample by sample without: set attn_implementation: eager, or packing: false"
        )
    if query.is_cuda:
        return _flash(query, key, value, attention_mask, scaling), None
    return _one_by_one(module, query, key, value, attention_mask, scaling), None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: Samples, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, length, size = query.shape
    q, k, v = (x.transpose(1, 2).reshape(rows * length, x.shape[1], size) for x in (query, key, value))
    window = -1 if samples.window is None else samples.window - 1
    # torch 2.11 takes fewer key heads without being told, and does not know the word
    told = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    longest = samples.packing.longest
    out = varlen_attn(
        q, k, v, samples.starts, samples.starts, longest, longest, scale=scaling, window_size=(window, 0), **told
    )
    return out.view(rows, length, heads, size)


def _one_by_one(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    samples: Samples,
    scaling: float | None,
) -> torch.Tensor:
    rows, _, length, _ = query.shape
    starts, pieces = samples.packing.starts, []
    for start, stop in zip(starts, starts[1:], strict=False):
        row, at = divmod(start, length)
        q, k, v = (x[row : row + 1, :, at : at + stop - start] for x in (query, key, value))
        mask = None
        if samples.window is not None and samples.window < stop - start:
            behind = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None, :]
            mask = ((behind >= 0) & (behind < samples.window))[None, None]
        pieces.append(sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)[0])
    return torch.cat(pieces, dim=1).view(rows, length, *pieces[0].shape[2:])
