"""Output projection, cross entropy and all their gradients, without ever holding the logits of more than a chunk.

The whole batch's number of target tokens is known before it starts, so loss and gradients are divided once, by that.
Sums over chunks and calls are in fp32; the logits are rounded to the compute dtype, as the model itself does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens whose logits are held at once. A larger chunk writes the fp32 weight gradient less often (1.6 GB a time for a
# 128,256 x 3,072 matrix), a smaller one takes less memory: 4096 x 128,256 are 1.05 GB of bf16 logits.
CHUNK_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Softmax:
    """How logits come from z = hidden @ weight.T + bias: softcap(scale * z)."""

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, z: Tensor) -> Tensor:
        """fp32 logits; z [n, V] is left as it is."""
        logits = z.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def chain(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient for z from the gradient for the logits, in place. `logits`: as `logits` gave them."""
        if self.softcap is not None:
            grad.mul_(1.0 - (logits / self.softcap) ** 2)
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def loss_only(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softmax: Softmax, *, chunk: int = CHUNK_TOKENS
) -> Tensor:
    """Sum of the cross entropies. hidden [n, H], weight [V, H], bias [V], labels int64 [n]; returns fp32 []."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = softmax.logits(torch.nn.functional.linear(hidden[part], weight, bias))
        picked = logits.gather(1, labels[part, None]).squeeze(1)
        total += (torch.logsumexp(logits, dim=1) - picked).sum()
    return total


def loss_and_grads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softmax: Softmax,
    *,
    denominator: float,
    weight_sum: Tensor | None,
    bias_sum: Tensor | None,
    overwrite: bool,
    chunk: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Loss / denominator (fp32 []) and its gradient for hidden ([n, H], hidden's dtype).

    hidden [n, H], weight [V, H], bias [V] or None, labels int64 [n], all valid. weight_sum fp32 [V, H] and bias_sum
    fp32 [V] take the gradients of weight and bias; None: not wanted. weight_sum is added to unless `overwrite`,
    bias_sum is always overwritten.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    hidden_grad = torch.empty_like(hidden)
    if bias_sum is not None:
        bias_sum.zero_()
    if weight_sum is not None and overwrite and hidden.shape[0] == 0:
        weight_sum.zero_()
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        h = hidden[part]
        z = torch.nn.functional.linear(h, weight, bias)
        losses, dz = _softmax_gradient(z, labels[part], softmax, 1.0 / denominator)
        total += losses.sum()
        torch.mm(dz, weight, out=hidden_grad[part])
        if weight_sum is not None:
            _add_outer(weight_sum, dz, h, overwrite=overwrite and start == 0)
        if bias_sum is not None:
            bias_sum.add_(dz.sum(0, dtype=torch.float32))
    return total / denominator, hidden_grad


def _softmax_gradient(z: Tensor, labels: Tensor, softmax: Softmax, factor: float) -> tuple[Tensor, Tensor]:
    """Cross entropies (fp32 [n]) and factor times their gradient for z. z [n, V] may be overwritten."""
    if z.is_cuda:
        from slideformer.kernels.softmax_gradient import softmax_gradient_

        losses = softmax_gradient_(z, labels, scale=softmax.scale, softcap=softmax.softcap, factor=factor)
        return losses, z
    logits = softmax.logits(z)
    log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
    losses = (log_sum - logits.gather(1, labels[:, None])).squeeze(1)
    grad = torch.exp(logits - log_sum)
    grad.scatter_add_(1, labels[:, None], torch.full_like(log_sum, -1.0))
    return losses, softmax.chain(grad.mul_(factor), logits).to(z.dtype)


def _add_outer(total: Tensor, dz: Tensor, hidden: Tensor, *, overwrite: bool) -> None:
    """total (fp32 [V, H]) (+)= dz.T @ hidden, summed in fp32."""
    if dz.dtype is torch.float32:
        torch.addmm(total, dz.t(), hidden, beta=0.0 if overwrite else 1.0, out=total)
    elif dz.is_cuda:
        if overwrite:
            torch.mm(dz.t(), hidden, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, dz.t(), hidden, out_dtype=torch.float32, out=total)
    else:  # a bf16 matrix product on the CPU cannot write fp32
        product = torch.mm(dz.t().float(), hidden.float())
        total.copy_(product) if overwrite else total.add_(product)
