"""What is handed to torch's variable-length attention, which runs on a GPU only: its words are those that the installed
torch takes, and worked out by hand they mean the attention that a CPU computes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps

import pytest
import torch
from torch.nn.attention import varlen

from slideformer.model.packed_attention import Samples, _flash, _one_by_one, packing_of, samples_of

LENGTHS = ((5, 1, 6), (12,))


class Module(torch.nn.Module):
    num_key_value_groups, is_causal = 2, True


def by_hand(own: Callable[..., torch.Tensor], *, has_gqa: bool) -> Callable[..., torch.Tensor]:
    """Attention as varlen_attn's documentation says, of words that `own` takes. has_gqa: the word is known (torch 2.12
    on); where it is not, fewer key heads are taken without it."""
    signature = inspect.signature(own)
    if not has_gqa:
        signature = signature.replace(parameters=[p for n, p in signature.parameters.items() if n != "enable_gqa"])

    @wraps(own)
    def attention(*args: object, **kwargs: object) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        q, k, v, starts, others, longest, longest_k = list(given.arguments.values())[:7]
        window, scale = given.arguments["window_size"], given.arguments["scale"]
        assert torch.equal(starts, others) and longest == longest_k == int(starts.diff().max())
        assert starts.dtype is torch.int32 and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        if k.shape[1] != q.shape[1]:
            assert given.arguments.get("enable_gqa", True), "fewer key heads than query heads, and it is not told"
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = torch.empty_like(q)
        for a, b in zip(starts[:-1], starts[1:], strict=True):
            n = int(b - a)
            behind = torch.arange(n)[:, None] - torch.arange(n)
            seen = (behind >= -window[1] if window[1] >= 0 else True) & (behind <= (window[0] if window[0] >= 0 else n))
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * scale
            out[a:b] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v[a:b])
        return out

    attention.__signature__ = signature
    return attention


@pytest.mark.parametrize("has_gqa", [True, False], ids=["with enable_gqa", "without"])
@pytest.mark.parametrize("window", [None, 3])
def test_torchs_flash_attention_is_asked_for_the_attention_of_a_cpu(monkeypatch, generator, window, has_gqa):
    monkeypatch.setattr(varlen, "varlen_attn", by_hand(varlen.varlen_attn, has_gqa=has_gqa))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    samples = samples_of(positions, packing_of(positions))
    samples = Samples(samples.packing, samples.starts, window)
    q, k, v = (torch.randn(2, 12, heads, 8, generator=generator).transpose(1, 2) for heads in (4, 2, 2))
    asked = _flash(q, k, v, samples, 0.3)
    expected = _one_by_one(Module(), q, k, v, samples, 0.3)
    assert (asked - expected).abs().max() <= 1e-5  # fp32: sums of 8 and 12 terms of size 1
