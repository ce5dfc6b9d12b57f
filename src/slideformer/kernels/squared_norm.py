"""Sum of squares of a flat gradient, in Triton: read once, summed in an order that depends on its length alone.

Each program squares and sums its own share in fp32, the shares are summed in fp64 by one more program. No atomics: two
runs give the same bits. Not the bits of torch.linalg.vector_norm, nor of torch._foreach_norm, which differ from each
other: all three sum in different orders.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
NUM_WARPS = 8
# Programs, and so shares: enough for every multiprocessor (132 on an H200) to have several, few enough for one program
# to add up.
MAX_SHARES = 1024


@triton.jit
def _shares(grad_ptr, share_ptr, numel, IS_BF16: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, numel, step):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + at, mask=at < numel, other=0)
        if IS_BF16:
            g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        total += g * g
    tl.store(share_ptr + tl.program_id(0), tl.sum(total.to(tl.float64), axis=0))


@triton.jit
def _add_shares(share_ptr, out_ptr, num_shares, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    shares = tl.load(share_ptr + at, mask=at < num_shares, other=0.0)
    tl.store(out_ptr, tl.sum(shares, axis=0).to(tl.float32))


def squared_norm_(grad: torch.Tensor, out: torch.Tensor) -> None:
    """What `slideformer.kernels.device_update.squared_norm_` does, for tensors on a GPU; arguments checked there."""
    numel = grad.numel()
    as_bits = grad.dtype is torch.bfloat16
    num_shares = max(min(triton.cdiv(numel, BLOCK), MAX_SHARES), 1)
    shares = torch.empty(num_shares, dtype=torch.float64, device=grad.device)
    bits = grad.view(torch.int16) if as_bits else grad
    _shares[(num_shares,)](
        bits, shares, numel, IS_BF16=as_bits, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True
    )
    _add_shares[(1,)](shares, out, num_shares, BLOCK=MAX_SHARES, num_warps=4, enable_fp_fusion=True)
