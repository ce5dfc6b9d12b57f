"""The door to work on host memory, what it demands of tensors, and its stand-in in torch.

Arguments are checked here, for both implementations: what reaches C++ are pointers and sizes that fit each other.
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slideformer.optim import Hyper, join, reference_update, reference_update_rows, split

# Elements the stand-in updates at a time: its ten or so temporaries should stay in the cache. 2-core Sapphire Rapids,
# 2026-11-30, 16 Mi elements: 23 Mparam/s with 2**18 and 2**20, 7 with 2**16 (calls dominate), 8 with all at once.
TORCH_CHUNK_NUMEL = 1 << 18


class Planes(NamedTuple):
    """The state of a tile [n], or of a matrix [V, H]: bf16 and int16 planes of the master weight, fp32 moments."""

    weight: Tensor
    residual: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Parts(IntFlag):
    """Of a new state, what is written (enum sf_part)."""

    WEIGHT = 1
    RESIDUAL = 2
    MOMENTS = 4
    ALL = 7

    def fields(self) -> tuple[str, ...]:
        """Those of `Planes` that are among them."""
        of = (Parts.WEIGHT, Parts.RESIDUAL, Parts.MOMENTS, Parts.MOMENTS)
        return tuple(name for name, part in zip(Planes._fields, of, strict=True) if part in self)


class HostKernels(Protocol):
    """Operations on CPU tensors. All block the caller, write in place, and raise ValueError for a tensor that does
    not fit (naming it). Results are bit-identical for any implementation, thread count and instruction set. May be
    called from several threads at once on different tensors. Tensors must be contiguous; any alignment will do."""

    @property
    def isa(self) -> str:
        """The instruction set: "avx512", "avx2", "neon", "baseline", or "torch"."""
        ...

    @property
    def threads(self) -> int:
        """Threads that work on one call, the caller counted in."""
        ...

    def update(
        self,
        weight: Tensor,
        residual: Tensor,
        grad: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        hyper: Hyper,
        *,
        out: Planes | None = None,
        parts: Parts = Parts.ALL,
    ) -> None:
        """Apply one AdamW step to a tile.

        weight: bf16 plane, residual: int16 plane, exp_avg, exp_avg_sq: fp32, all [n].
        grad: bf16 or fp32 [n], or None for zero. out: where the new state goes, the old one staying as it is (None: in
        its place); the two must not overlap. parts: of out, what is written; the others stay as they are.
        Specification: `slideformer.optim.reference_update`.
        """
        ...

    def update_rows(
        self,
        weight: Tensor,
        residual: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rows: Tensor,
        grad: Tensor | None,
        grad_rows: Tensor | None,
        hyper: Hyper,
        *,
        more: Tensor | None = None,
        out: Planes | None = None,
        parts: Parts = Parts.ALL,
    ) -> None:
        """Apply one AdamW step to some rows of [V, H] planes and moments.

        rows: int64 [n], distinct. grad: bf16 or fp32 [k, H], or None for zero. Row rows[i] takes gradient row
        grad_rows[i] (int64 [n]; row i if None), or a gradient of zero where that is negative. more: gradient rows k
        and up, [m, H] of grad's dtype, where they lie elsewhere. out, parts: as in `update`; its other rows stay as
        they are.
        """
        ...

    def gather_rows(self, src: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[i] = src[rows[i]]. src: [V, H] of any dtype, rows: int64 [n], out: [n, H] of src's dtype."""
        ...

    def split(self, master: Tensor, weight: Tensor, residual: Tensor) -> None:
        """Write fp32 [n] into its bf16 and int16 planes [n]."""
        ...

    def join(self, weight: Tensor, residual: Tensor, out: Tensor) -> None:
        """Write the fp32 master of two planes [n] into out, fp32 [n]."""
        ...

    def close(self) -> None:
        """End the threads. No call may be running or follow."""
        ...


class TorchKernels:
    """`HostKernels` in torch: the specification itself, on one thread of torch's choosing. For machines where the
    native library could not be built."""

    isa = "torch"

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def update(
        self,
        weight: Tensor,
        residual: Tensor,
        grad: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        hyper: Hyper,
        *,
        out: Planes | None = None,
        parts: Parts = Parts.ALL,
    ) -> None:
        check_tile(weight, residual, grad, exp_avg, exp_avg_sq, out, parts)
        for start in range(0, weight.numel(), TORCH_CHUNK_NUMEL):
            piece = slice(start, start + TORCH_CHUNK_NUMEL)
            planes = Planes(weight[piece], residual[piece], exp_avg[piece], exp_avg_sq[piece])
            if out is not None:
                planes = Planes(*(plane.clone() for plane in planes))
            part_grad = None if grad is None else grad[piece]
            reference_update(planes.weight, planes.residual, part_grad, planes.exp_avg, planes.exp_avg_sq, hyper)
            for name in () if out is None else parts.fields():
                getattr(out, name)[piece] = getattr(planes, name)

    def update_rows(
        self,
        weight: Tensor,
        residual: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rows: Tensor,
        grad: Tensor | None,
        grad_rows: Tensor | None,
        hyper: Hyper,
        *,
        more: Tensor | None = None,
        out: Planes | None = None,
        parts: Parts = Parts.ALL,
    ) -> None:
        check_rows(weight, residual, exp_avg, exp_avg_sq, rows, grad, grad_rows, more, out, parts)
        num_rows, num = weight.shape[0], rows.numel()
        num_grad_rows = sum(some.shape[0] for some in (grad, more) if some is not None)
        index = _first((rows < 0) | (rows >= num_rows))
        if index is None and rows.unique().numel() != num:
            index = next(i for i in range(num) if rows[i] in rows[:i])
        if index is None and grad is not None and grad_rows is not None:
            index = _first(grad_rows >= num_grad_rows)
        if index is None and grad is not None and grad_rows is None and num > num_grad_rows:
            index = num_grad_rows
        if index is not None:
            raise bad_row(index, rows, num_rows, num_grad_rows, grad_rows)
        step = max(TORCH_CHUNK_NUMEL // max(weight.shape[1], 1), 1)
        for start in range(0, num, step):
            part = slice(start, start + step)
            part_grad, part_rows = grad, (torch.arange(num) if grad_rows is None else grad_rows)[part]
            if grad is not None and more is not None:
                part_grad, part_rows = _picked(grad, more, part_rows)
            planes, among = Planes(weight, residual, exp_avg, exp_avg_sq), rows[part]
            if out is not None:
                planes, among = Planes(*(plane[among] for plane in planes)), torch.arange(among.numel())
            reference_update_rows(*planes, among, part_grad, part_rows, hyper)
            for name in () if out is None else parts.fields():
                getattr(out, name)[rows[part]] = getattr(planes, name)

    def gather_rows(self, src: Tensor, rows: Tensor, out: Tensor) -> None:
        check_gather(src, rows, out)
        index = _first((rows < 0) | (rows >= src.shape[0]))
        if index is not None:
            raise bad_row(index, rows, src.shape[0], 0, None)
        torch.index_select(src, 0, rows, out=out)

    def split(self, master: Tensor, weight: Tensor, residual: Tensor) -> None:
        check_planes(master, weight, residual)
        split(master, weight, residual)

    def join(self, weight: Tensor, residual: Tensor, out: Tensor) -> None:
        check_planes(out, weight, residual, master_name="out")
        out.copy_(join(weight, residual))

    def close(self) -> None:
        pass


def check_tile(
    weight: Tensor,
    residual: Tensor,
    grad: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Planes | None = None,
    parts: Parts = Parts.ALL,
) -> None:
    """Raise ValueError unless these can be the arguments of `HostKernels.update`."""
    shape = weight.shape
    _check("weight", weight, (torch.bfloat16,), shape, num_dims=1)
    _check("residual", residual, (torch.int16,), shape)
    _check("exp_avg", exp_avg, (torch.float32,), shape)
    _check("exp_avg_sq", exp_avg_sq, (torch.float32,), shape)
    if grad is not None:
        _check("grad", grad, (torch.bfloat16, torch.float32), shape)
    _check_out(out, parts, Planes(weight, residual, exp_avg, exp_avg_sq))


def check_rows(
    weight: Tensor,
    residual: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grad: Tensor | None,
    grad_rows: Tensor | None,
    more: Tensor | None = None,
    out: Planes | None = None,
    parts: Parts = Parts.ALL,
) -> None:
    """Raise ValueError unless these can be the arguments of `HostKernels.update_rows`, row numbers left aside."""
    shape = weight.shape
    _check("weight", weight, (torch.bfloat16,), shape, num_dims=2)
    _check("residual", residual, (torch.int16,), shape)
    _check("exp_avg", exp_avg, (torch.float32,), shape)
    _check("exp_avg_sq", exp_avg_sq, (torch.float32,), shape)
    _check("rows", rows, (torch.int64,), rows.shape, num_dims=1)
    if grad is not None:
        _check("grad", grad, (torch.bfloat16, torch.float32), (*grad.shape[:1], shape[1]))
    if more is not None:
        if grad is None:
            raise ValueError("more is given without grad, whose rows it goes on with; give it as grad")
        _check("more", more, (grad.dtype,), (*more.shape[:1], shape[1]))
    if grad_rows is not None:
        _check("grad_rows", grad_rows, (torch.int64,), rows.shape)
    _check_out(out, parts, Planes(weight, residual, exp_avg, exp_avg_sq))


def check_gather(src: Tensor, rows: Tensor, out: Tensor) -> None:
    """Raise ValueError unless these can be the tensors of `HostKernels.gather_rows`, row numbers left aside."""
    _check("src", src, (src.dtype,), src.shape, num_dims=2)
    _check("rows", rows, (torch.int64,), rows.shape, num_dims=1)
    _check("out", out, (src.dtype,), (rows.numel(), src.shape[1]))


def check_planes(master: Tensor, weight: Tensor, residual: Tensor, *, master_name: str = "master") -> None:
    """Raise ValueError unless these can be an fp32 master and its two planes."""
    _check("weight", weight, (torch.bfloat16,), weight.shape, num_dims=1)
    _check("residual", residual, (torch.int16,), weight.shape)
    _check(master_name, master, (torch.float32,), weight.shape)


def bad_row(index: int, rows: Tensor, num_rows: int, num_grad_rows: int, grad_rows: Tensor | None) -> ValueError:
    """What is wrong with entry `index` of rows, or else of grad_rows."""
    row = int(rows[index])
    if not 0 <= row < num_rows:
        return ValueError(f"rows[{index}] is {row}, must be at least 0 and less than {num_rows}, the number of rows")
    if row in rows[:index]:
        return ValueError(f"rows[{index}] is {row}, which occurs before; give every row once")
    found = (
        f"grad_rows[{index}] is {int(grad_rows[index])}" if grad_rows is not None else f"rows has {len(rows)} entries"
    )
    return ValueError(f"{found}, but grad has {num_grad_rows} rows; every row needs a row of grad or a negative number")


def _check(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], *, num_dims: int | None = None
) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, must be {' or '.join(str(d) for d in dtypes)}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, must be on the CPU")
    if num_dims is not None and tensor.dim() != num_dims:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, must have {num_dims}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {list(shape)} like the others")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, must be contiguous")


def _check_out(out: Planes | None, parts: Parts, state: Planes) -> None:
    if out is None:
        if parts != Parts.ALL:
            raise ValueError(f"parts is {parts!r} without out; in place all is written, give memory for a part of it")
        return
    for name, target, source in zip(Planes._fields, out, state, strict=True):
        _check(f"out.{name}", target, (source.dtype,), source.shape)
        if max(target.data_ptr(), source.data_ptr()) < min(t.data_ptr() + t.nbytes for t in (target, source)):
            raise ValueError(f"out.{name} overlaps {name}; give memory of its own, or no out to update in place")


def _picked(grad: Tensor, more: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The wanted rows of two gradients that follow each other, [n, H], and which of these each is: -1 stays -1."""
    picked, first = grad.new_zeros(wanted.numel(), grad.shape[1]), grad.shape[0]
    own, other = (wanted >= 0) & (wanted < first), wanted >= first
    picked[own], picked[other] = grad[wanted[own]], more[wanted[other] - first]
    return picked, torch.arange(wanted.numel()).where(wanted >= 0, -1)


def _first(mask: Tensor) -> int | None:
    return int(mask.nonzero()[0]) if bool(mask.any()) else None
