"""The optimizer's work on tensors of one device, without a wait: the door, what it demands, and its torch form.

On a GPU the Triton kernels do it; on any other device the specification itself, in torch. Same bits for the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slideformer.optim import Hyper, reference_update


def update_(
    weight: Tensor,
    residual: Tensor,
    grad: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Hyper,
    *,
    decay_numel: int | None = None,
    grad_scale: Tensor | None = None,
) -> None:
    """Apply one AdamW step to a flat vector, in place: bit for bit `reference_update`, and so `HostKernels.update`.

    weight: bf16 plane, residual: int16 plane, exp_avg, exp_avg_sq: fp32, grad: bf16, fp32 or None (zero); all [n],
    contiguous, on one device. The first decay_numel elements (None: all) decay by hyper's weight_decay, the others not
    at all: a unit's whole trained prefix is one call. grad_scale: fp32 [] or [1] on the same device, read when the
    kernel runs, in the place of hyper.grad_scale; for a clip factor that the host does not know yet.
    On a GPU: one launch on the current stream, no wait for the device, no allocation; nothing is compiled again when
    numbers change. Compiled once for a dtype of grad and an alignment; fastest where the five addresses and n are
    multiples of 16.
    Raises ValueError naming the tensor that does not fit.
    """
    _check_update(weight, residual, grad, exp_avg, exp_avg_sq, grad_scale)
    numel = weight.numel()
    decay_numel = numel if decay_numel is None else decay_numel
    if not 0 <= decay_numel <= numel:
        raise ValueError(f"decay_numel is {decay_numel}, must be at least 0 and at most {numel}, the tensors' length")
    if weight.is_cuda:
        from slideformer.kernels.adamw import adamw_

        adamw_(weight, residual, grad, exp_avg, exp_avg_sq, hyper, decay_numel=decay_numel, grad_scale=grad_scale)
        return
    scale = hyper.grad_scale if grad_scale is None else float(grad_scale)
    for part, weight_decay in ((slice(0, decay_numel), hyper.weight_decay), (slice(decay_numel, numel), 0.0)):
        mine = Hyper(hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, weight_decay, hyper.step, scale)
        part_grad = None if grad is None else grad[part]
        reference_update(weight[part], residual[part], part_grad, exp_avg[part], exp_avg_sq[part], mine)


def squared_norm_(grad: Tensor, out: Tensor) -> None:
    """Write the sum of squares of a flat gradient to out. grad: bf16 or fp32 [n], out: fp32 [] or [1], one device.

    On a GPU: two launches on the current stream, no wait, and up to 8 KiB from torch's allocator. Each share of the sum
    is in fp32 (an fp32 gradient above 1.8e19 gives inf), the sum of shares in fp64; the same bits in every run on one
    kind of device. Zero for n = 0. Raises ValueError naming the tensor that does not fit.
    """
    _check("grad", grad, (torch.bfloat16, torch.float32), grad.shape, grad.device, num_dims=1)
    if out.dtype is not torch.float32 or out.numel() != 1 or out.device != grad.device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}, must be one torch.float32 on {grad.device}"
        )
    if grad.is_cuda:
        from slideformer.kernels import squared_norm

        squared_norm.squared_norm_(grad, out)
    else:
        out.copy_(grad.double().square().sum())


def implementation(device: torch.device) -> str:
    """What does the work on tensors of `device`: "triton" or "torch"."""
    return "triton" if device.type == "cuda" else "torch"


def _check_update(
    weight: Tensor,
    residual: Tensor,
    grad: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad_scale: Tensor | None,
) -> None:
    shape, device = weight.shape, weight.device
    _check("weight", weight, (torch.bfloat16,), shape, device, num_dims=1)
    _check("residual", residual, (torch.int16,), shape, device)
    _check("exp_avg", exp_avg, (torch.float32,), shape, device)
    _check("exp_avg_sq", exp_avg_sq, (torch.float32,), shape, device)
    if grad is not None:
        _check("grad", grad, (torch.bfloat16, torch.float32), shape, device)
    if grad_scale is not None:
        _check("grad_scale", grad_scale, (torch.float32,), grad_scale.shape, device)
        if grad_scale.numel() != 1:
            raise ValueError(f"grad_scale has {grad_scale.numel()} elements, must have one")


def _check(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    *,
    num_dims: int | None = None,
) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, must be {' or '.join(str(d) for d in dtypes)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, must be on {device} like the others")
    if num_dims is not None and tensor.dim() != num_dims:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, must have {num_dims}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {list(shape)} like the others")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, must be contiguous")
