"""RMSNorm in Triton, forward and backward, with the residual stream's additions on both sides of it.

Three conventions of models, told apart by two numbers: `offset` is added to the weight (Gemma keeps weight - 1), and
`round_first` rounds the normalised value to the compute dtype before it meets the weight (Llama) instead of after.
Sums are in fp32. Forward keeps the input and one fp32 number a row, nothing else. Rows are taken by as many programs as
the GPU runs at once, each of which has the next rows on their way while it works on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from slideformer.kernels.multiprocessors import multiprocessors, shared_nbytes


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is started. num_stages: tiles of rows under way in a program, the one it works on counted.
    programs_per_sm: programs that share the rows, for each multiprocessor; 0 is one tile a program."""

    num_warps: int
    num_stages: int
    programs_per_sm: int


# Elements of one tile: several short rows (heads of 128) share a program, a long row has one to itself.
TILE = 4096
# Shares of the copy's bandwidth at rows of 3,072, 4,096 and 2,048 in bf16 (H200, triton 3.6, 2026-11-30,
# benchmarks/tune_kernels.py): forward 0.97, 0.96, 0.94, with the addition 0.98, 0.95, 0.94 (8 warps: 0.66, 0.91, 0.88).
FORWARD = Launch(num_warps=4, num_stages=1, programs_per_sm=0)
# Backward 0.91, 0.92, 0.92, with the addition 0.99, 0.96, 0.96 (8 warps, 2 stages, 3 programs: 0.77, 0.64, 0.64).
BACKWARD = Launch(num_warps=4, num_stages=3, programs_per_sm=2)
# Warps of tiles of several rows, where backward with 4 runs out of registers, and of rows that are longer than a tile.
SHORT_WARPS, LONG_WARPS = 8, 16
# Bytes of shared memory for the sums of a row and what the compiler aligns.
SHARED_MARGIN = 2048
# Programs that add to one row of sums of the weight's gradient. Two, and no more: a sum of two numbers has the same
# bits whichever comes first.
PROGRAMS_PER_SUM = 2
# The tile of the last sum, of the programs' shares: 3,072 columns are 96 programs, and 128 bytes of a row one access.
SUM_ROWS, SUM_COLUMNS = 64, 32


def reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, round_first: bool) -> torch.Tensor:
    """The specification, in x's dtype with fp32 (fp64 for fp64) inside. x [..., D], weight [D]."""
    wide = x if x.dtype is torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype).to(wide.dtype)
    return (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)


@triton.jit
def _load(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _early(normed, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """What meets the weight, and its gradient: rounded, as the model does, where an ulp of bf16 is 2**-8."""
    if ROUND_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    return normed


@triton.jit
def _forward(
    x_ptr,
    add_ptr,  # what is added to x first, unless not ADD
    sum_ptr,  # x + add, rounded
    weight_ptr,
    out_ptr,
    rstd_ptr,
    num_rows,
    num_columns,
    eps,
    offset,
    ADD: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,  # columns are HEAD and up to TAIL more, so that few lanes of a tile have none
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    head = tl.arange(0, HEAD)[None, :]
    head_weight = tl.load(weight_ptr + head).to(tl.float32) + offset
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        in_tail = tail < num_columns
        tail_weight = _load(weight_ptr, tail, in_tail) + offset
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        there = (rows < num_rows)[:, None]
        at = rows[:, None] * num_columns
        x = _load(x_ptr, at + head, there)
        if TAIL:
            tail_x = _load(x_ptr, at + tail, there & in_tail)
        if ADD:
            x = (x + _load(add_ptr, at + head, there)).to(dtype)
            tl.store(sum_ptr + at + head, x, mask=there)
            x = x.to(tl.float32)
            if TAIL:
                tail_x = (tail_x + _load(add_ptr, at + tail, there & in_tail)).to(dtype)
                tl.store(sum_ptr + at + tail, tail_x, mask=there & in_tail)
                tail_x = tail_x.to(tl.float32)
        total = tl.sum(x * x, axis=1)
        if TAIL:
            total += tl.sum(tail_x * tail_x, axis=1)
        rstd = 1.0 / tl.sqrt(total / num_columns + eps)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
        normed = _early(x * rstd[:, None], dtype, ROUND_FIRST)
        tl.store(out_ptr + at + head, (normed * head_weight).to(dtype), mask=there)
        if TAIL:
            normed = _early(tail_x * rstd[:, None], dtype, ROUND_FIRST)
            tl.store(out_ptr + at + tail, (normed * tail_weight).to(dtype), mask=there & in_tail)


@triton.jit
def _x_grad(weighted, normed, mean, rstd, sum_grad, at, mask, ADD: tl.constexpr):
    grad = (weighted - normed * mean[:, None]) * rstd[:, None]
    if ADD:
        grad += _load(sum_grad, at, mask)
    return grad


@triton.jit
def _backward(
    grad_ptr,  # for the output
    sum_grad_ptr,  # for x + add, or x, from where else it is used, unless not ADD
    x_ptr,
    weight_ptr,
    rstd_ptr,
    x_grad_ptr,  # may be grad_ptr: an element is read before it is written, by the same program
    weight_grad_ptr,  # fp32 zeros, a row for each PER_SUM programs
    num_rows,
    num_columns,
    offset,
    ADD: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    PER_SUM: tl.constexpr,
):
    dtype = x_grad_ptr.dtype.element_ty
    head = tl.arange(0, HEAD)[None, :]
    head_weight = tl.load(weight_ptr + head).to(tl.float32) + offset
    head_sum = tl.zeros([ROWS, HEAD], tl.float32)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        in_tail = tail < num_columns
        tail_weight = _load(weight_ptr, tail, in_tail) + offset
        tail_sum = tl.zeros([ROWS, TAIL], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        there = (rows < num_rows)[:, None]
        at = rows[:, None] * num_columns
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        grad = _load(grad_ptr, at + head, there)
        normed = _load(x_ptr, at + head, there) * rstd[:, None]
        mean = tl.sum(grad * head_weight * normed, axis=1) / num_columns
        if TAIL:
            tail_grad = _load(grad_ptr, at + tail, there & in_tail)
            tail_normed = _load(x_ptr, at + tail, there & in_tail) * rstd[:, None]
            mean += tl.sum(tail_grad * tail_weight * tail_normed, axis=1) / num_columns
        x_grad = _x_grad(grad * head_weight, normed, mean, rstd, sum_grad_ptr, at + head, there, ADD)
        tl.store(x_grad_ptr + at + head, x_grad.to(dtype), mask=there)
        if WEIGHT_GRAD:
            head_sum += grad * _early(normed, dtype, ROUND_FIRST)
        if TAIL:
            mask = there & in_tail
            x_grad = _x_grad(tail_grad * tail_weight, tail_normed, mean, rstd, sum_grad_ptr, at + tail, mask, ADD)
            tl.store(x_grad_ptr + at + tail, x_grad.to(dtype), mask=mask)
            if WEIGHT_GRAD:
                tail_sum += tail_grad * _early(tail_normed, dtype, ROUND_FIRST)
    if WEIGHT_GRAD:
        sums = weight_grad_ptr + tl.program_id(0) // PER_SUM * num_columns
        tl.atomic_add(sums + tl.arange(0, HEAD), tl.sum(head_sum, axis=0), sem="relaxed")
        if TAIL:
            columns = HEAD + tl.arange(0, TAIL)
            tl.atomic_add(sums + columns, tl.sum(tail_sum, axis=0), mask=columns < num_columns, sem="relaxed")


@triton.jit
def _add_up(sum_ptr, out_ptr, num_sums, num_columns, SUMS: tl.constexpr, COLUMNS: tl.constexpr):
    """The programs' sums, to the weight's dtype. A loop, so that their number may be anything."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = (columns < num_columns)[None, :]
    total = tl.zeros([SUMS, COLUMNS], tl.float32)
    for first in range(0, num_sums, SUMS):
        sums = first + tl.arange(0, SUMS)
        total += _load(sum_ptr, sums[:, None] * num_columns + columns[None, :], (sums < num_sums)[:, None] & there)
    out = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, out, mask=columns < num_columns)


def _stages(launch: Launch, tile_nbytes: int, head: int, shared: int) -> int:
    """As many as have room: all but one lie in shared memory, where the sums are also turned round for their store."""
    room = shared - 4 * head - SHARED_MARGIN
    return max(min(launch.num_stages, 1 + room // tile_nbytes), 1)


@lru_cache(1024)  # 10 us each, where a launch takes some 20
def _shape(
    num_rows: int, num_columns: int, launch: Launch, device: torch.device, element_nbytes: int
) -> tuple[int, dict[str, int]]:
    """Number of programs, and the tile's sizes. element_nbytes: of all that is read of a column."""
    head = triton.next_power_of_2(num_columns + 1) // 2
    tail = triton.next_power_of_2(num_columns - head) if num_columns > head else 0
    rows = triton.next_power_of_2(max(TILE // (head + tail), 1) + 1) // 2
    tiles = triton.cdiv(num_rows, rows)
    most = launch.programs_per_sm * multiprocessors(device) or tiles
    num_warps = LONG_WARPS if head + tail > TILE else launch.num_warps if rows == 1 else SHORT_WARPS
    stages = _stages(launch, rows * (head + tail) * element_nbytes, head, shared_nbytes(device))
    return min(tiles, most), {"ROWS": rows, "HEAD": head, "TAIL": tail, "STAGES": stages, "num_warps": num_warps}


class _RmsNorm(torch.autograd.Function):
    """(x, add or None, weight) -> (x + add, its norm)."""

    @staticmethod
    def forward(ctx, x, add, weight, eps, offset, round_first, overwrite_grad):
        x = x.contiguous()
        num_rows, num_columns = x.numel() // x.shape[-1], x.shape[-1]
        out = torch.empty_like(x)
        rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        total = x if add is None else torch.empty_like(x)
        num_programs, sizes = _shape(num_rows, num_columns, FORWARD, x.device, x.itemsize)
        _forward[(num_programs,)](
            x,
            x if add is None else add.contiguous(),
            total,
            weight,
            out,
            rstd,
            num_rows,
            num_columns,
            eps,
            offset,
            ADD=add is not None,
            ROUND_FIRST=round_first,
            enable_fp_fusion=True,
            **sizes,
        )
        ctx.save_for_backward(total, weight, rstd)
        ctx.adds, ctx.numbers, ctx.overwrite_grad = add is not None, (offset, round_first), overwrite_grad
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx, total_grad, grad):
        x, weight, rstd = ctx.saved_tensors
        offset, round_first = ctx.numbers
        num_rows, num_columns = rstd.numel(), x.shape[-1]
        grad = torch.zeros_like(x) if grad is None else grad.contiguous()
        x_grad = grad if ctx.overwrite_grad else torch.empty_like(x)
        element_nbytes = x.itemsize * (2 if total_grad is None else 3)
        num_programs, sizes = _shape(num_rows, num_columns, BACKWARD, x.device, element_nbytes)
        wants_weight = ctx.needs_input_grad[2]
        num_sums = triton.cdiv(num_programs, PROGRAMS_PER_SUM) if wants_weight else 0
        sums = torch.zeros(num_sums, num_columns, dtype=torch.float32, device=x.device)
        _backward[(num_programs,)](
            grad,
            grad if total_grad is None else total_grad.contiguous(),
            x,
            weight,
            rstd,
            x_grad,
            sums,
            num_rows,
            num_columns,
            offset,
            ADD=total_grad is not None,
            ROUND_FIRST=round_first,
            WEIGHT_GRAD=wants_weight,
            PER_SUM=PROGRAMS_PER_SUM,
            enable_fp_fusion=True,
            **sizes,
        )
        weight_grad = _added_up(sums, weight) if wants_weight else None
        return x_grad, x_grad if ctx.adds else None, weight_grad, None, None, None, None


def _added_up(sums: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(weight)
    grid = (triton.cdiv(weight.numel(), SUM_COLUMNS),)
    _add_up[grid](sums, out, *sums.shape, SUMS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8, enable_fp_fusion=True)
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round_first: bool = False,
    overwrite_grad: bool = False,
) -> torch.Tensor:
    """RMSNorm over the last dimension; differentiable in x and weight.

    x: [..., D], bf16, fp16 or fp32, on a GPU; weight: [D], the same dtype. Heads in front of the sequence ([B, heads,
    S, D], as a transposed view) are taken as they lie. overwrite_grad: backward writes over the gradient it is given,
    which nothing else may then read; it takes no memory of x's size.
    Source: Zhang & Sennrich, arXiv 1910.07467.
    """
    if x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous():
        across = _RmsNorm.apply(x.transpose(1, 2), None, weight, eps, offset, round_first, overwrite_grad)[1]
        return across.transpose(1, 2)
    return _RmsNorm.apply(x, None, weight, eps, offset, round_first, overwrite_grad)[1]


def add_rms_norm(
    x: torch.Tensor,
    add: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round_first: bool = False,
    overwrite_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + add, and its `rms_norm`, in one pass; backward adds the sum's own gradient in the same pass.

    add: like x, or None for nothing: the sum is then x, and only backward saves an addition.
    """
    return _RmsNorm.apply(x, add, weight, eps, offset, round_first, overwrite_grad)
