"""RMSNorm in Triton, forward and backward, with the residual stream's additions on both sides of it.

Three conventions of models, told apart by two numbers: `offset` is added to the weight (Gemma keeps weight - 1), and
`round_first` rounds the normalised value to the compute dtype before it meets the weight (Llama) instead of after.
Sums are in fp32. Forward keeps the input and one fp32 number a row, nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements of one tile: several short rows (heads of 128) share a program, a long row has one to itself.
TILE = 4096
# Programs of the backward pass, each with a sum of the weight's gradient of its own, added up by torch afterwards: a
# constant, so that the order of sums does not depend on the GPU.
MAX_PROGRAMS = 512


def reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, round_first: bool) -> torch.Tensor:
    """The specification, in x's dtype with fp32 (fp64 for fp64) inside. x [..., D], weight [D]."""
    wide = x if x.dtype is torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype).to(wide.dtype)
    return (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)


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
    BLOCK: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = rows[:, None] * num_columns + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + at, x, mask=mask)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / num_columns + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    normed = x * rstd[:, None]
    if ROUND_FIRST:  # as the model does: an ulp of bf16 is 2**-8
        normed = normed.to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32) + offset
    tl.store(out_ptr + at, (normed * weight[None, :]).to(dtype), mask=mask)


@triton.jit
def _backward(
    grad_ptr,  # for the output
    sum_grad_ptr,  # for x + add, or x, from where else it is used, unless not ADD
    x_ptr,
    weight_ptr,
    rstd_ptr,
    x_grad_ptr,  # may be grad_ptr: an element is read before it is written, by the same program
    weight_grad_ptr,  # fp32, a row for each program
    num_rows,
    num_columns,
    offset,
    rows_per_program,
    ADD: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = x_grad_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32) + offset
    weight_grad = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * rows_per_program
    for start in range(first, tl.minimum(first + rows_per_program, num_rows), ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        normed = x * rstd[:, None]
        weighted = grad * weight[None, :]
        mean = tl.sum(weighted * normed, axis=1) / num_columns
        x_grad = (weighted - normed * mean[:, None]) * rstd[:, None]
        if ADD:
            x_grad += tl.load(sum_grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_grad_ptr + at, x_grad.to(dtype), mask=mask)
        if WEIGHT_GRAD:
            if ROUND_FIRST:
                normed = normed.to(dtype).to(tl.float32)
            weight_grad += tl.sum(grad * normed, axis=0)
    if WEIGHT_GRAD:
        tl.store(weight_grad_ptr + tl.program_id(0) * num_columns + columns, weight_grad, mask=columns < num_columns)


def _tile(num_columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(num_columns)
    return {"BLOCK": block, "ROWS": max(TILE // block, 1), "num_warps": 16 if block > TILE else 8}


class _RmsNorm(torch.autograd.Function):
    """(x, add or None, weight) -> (x + add, its norm)."""

    @staticmethod
    def forward(ctx, x, add, weight, eps, offset, round_first, overwrite_grad):
        x = x.contiguous()
        num_rows, num_columns = x.numel() // x.shape[-1], x.shape[-1]
        tile = _tile(num_columns)
        out = torch.empty_like(x)
        rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        total = x if add is None else torch.empty_like(x)
        _forward[(triton.cdiv(num_rows, tile["ROWS"]),)](
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
            **tile,
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
        tile = _tile(num_columns)
        grad = torch.zeros_like(x) if grad is None else grad.contiguous()
        x_grad = grad if ctx.overwrite_grad else torch.empty_like(x)
        groups = triton.cdiv(num_rows, tile["ROWS"])
        rows_per_program = triton.cdiv(groups, MAX_PROGRAMS) * tile["ROWS"]
        num_programs = triton.cdiv(num_rows, rows_per_program)
        wants_weight = ctx.needs_input_grad[2]
        sums = torch.empty(num_programs if wants_weight else 0, num_columns, dtype=torch.float32, device=x.device)
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
            rows_per_program,
            ADD=total_grad is not None,
            ROUND_FIRST=round_first,
            WEIGHT_GRAD=wants_weight,
            enable_fp_fusion=True,
            **tile,
        )
        weight_grad = sums.sum(0).to(weight.dtype) if wants_weight else None
        return x_grad, x_grad if ctx.adds else None, weight_grad, None, None, None, None


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
