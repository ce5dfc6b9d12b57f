"""Output projection, cross entropy and all their gradients, without ever holding the logits of more than a chunk.

The whole batch's number of target tokens is known before it starts, so loss and gradients are divided once, by that.
Sums over chunks and calls are in fp32; the logits are rounded to the compute dtype, as the model itself does. Two ways:
`loss_and_grads` where the projection and its gradient are on the device, `SlicedLoss` where they come by slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens whose logits are held at once, at most. A larger chunk writes the fp32 weight gradient less often (1.6 GB a
# time for a 128,256 x 3,072 matrix), a smaller one takes less memory: 3072 x 128,256 are 0.79 GB of bf16 logits.
CHUNK_TOKENS = 3072
# What a chunk's number of tokens decides is how evenly the hidden gradient's tiles fall on the multiprocessors, since
# each tile is a long sum over the vocabulary. 16,384 tokens, 128,256 x 3,072, H200 (132 of them), 2026-11-30: chunks of
# 4096 (3 rounds each, nearly full) 59.4 ms, of 2048 (2, the second half empty) 65.6, of 1024 (1, a quarter empty) 68.0.
TILE_TOKENS, TILE_WIDTH = 128, 256
LEAST_TOKENS = 1024
CHUNK_ROUNDS = 0.2  # what one more chunk costs beside its rounds, from the same three


def chunk_tokens(num_tokens: int, width: int, multiprocessors: int) -> int:
    """Tokens of a chunk, at most CHUNK_TOKENS, so that the hidden gradient of all of them takes the fewest rounds."""
    if num_tokens <= CHUNK_TOKENS:
        return max(num_tokens, 1)

    def rounds(tokens: int) -> int:
        return -(-(-(-tokens // TILE_TOKENS) * -(-width // TILE_WIDTH)) // multiprocessors)

    def cost(chunk: int) -> float:
        chunks, rest = divmod(num_tokens, chunk)
        return chunks * rounds(chunk) + rounds(rest) + CHUNK_ROUNDS * (chunks + (rest > 0))

    return min(range(CHUNK_TOKENS, LEAST_TOKENS - 1, -TILE_TOKENS), key=cost)


def _chunk_of(hidden: Tensor) -> int:
    if not hidden.is_cuda:
        return CHUNK_TOKENS
    from slideformer.kernels.multiprocessors import multiprocessors

    return chunk_tokens(*hidden.shape, multiprocessors(hidden.device))


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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softmax: Softmax,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Sum of the cross entropies. hidden [n, H], weight [V, H], bias [V], labels int64 [n]; returns fp32 []. Takes one
    chunk's logits and 12 bytes a token."""
    loss = SlicedLoss(hidden, labels, softmax, denominator=1.0, chunk=chunk)  # with one slice, the whole
    loss.see(0, weight, bias)
    return loss.loss()


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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss / denominator (fp32 []) and its gradient for hidden ([n, H], hidden's dtype).

    hidden [n, H], weight [V, H], bias [V] or None, labels int64 [n], all valid. weight_sum fp32 [V, H] and bias_sum
    fp32 [V] take the gradients of weight and bias; None: not wanted. weight_sum is added to unless `overwrite`,
    bias_sum is always overwritten. chunk: tokens whose logits are held at once; None: what suits the device.
    """
    chunk = chunk or _chunk_of(hidden)
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
            _add_product(weight_sum, dz.t(), h, overwrite=overwrite and start == 0)
        if bias_sum is not None:
            bias_sum.add_(dz.sum(0, dtype=torch.float32))
        del z, dz  # or the next chunk's logits would have memory of their own
    return total / denominator, hidden_grad


class SlicedLoss:
    """Loss and gradients of tokens whose projection comes in slices of the vocabulary, twice: first every slice is
    seen, then, with the sums known, every slice gets its gradient, complete, and gives its share of the hidden one.

    On the device at once: one slice of the projection, one of its gradient, chunk x slice logits, and fp32 [n, H] for
    the hidden gradient. For that the logits are computed twice. With several micro-batches one instance each: all of
    them see a slice, and later all add to the gradient of a slice, while it is there.
    hidden [n, H], labels int64 [n], all valid; both must stay as they are. denominator: as in `loss_and_grads`.
    """

    def __init__(
        self,
        hidden: Tensor,
        labels: Tensor,
        softmax: Softmax,
        *,
        denominator: float,
        chunk: int | None = None,
    ) -> None:
        num, device = hidden.shape[0], hidden.device
        self._hidden, self._labels, self._softmax, self._chunk = hidden, labels, softmax, chunk or _chunk_of(hidden)
        self._denominator = denominator
        self._maximum = torch.full((num,), float("-inf"), dtype=torch.float32, device=device)
        self._total, self._picked = (torch.zeros(num, dtype=torch.float32, device=device) for _ in range(2))
        self._log_sum: Tensor | None = None
        self._hidden_sum: Tensor | None = None

    def see(self, first_row: int, weight: Tensor, bias: Tensor | None) -> None:
        """Take rows first_row and on of the projection into the sums. weight [Vs, H], bias [Vs], hidden's dtype."""
        assert self._log_sum is None, "the loss was already asked for"
        for part, _, z in self._chunks(weight, bias):
            state = (self._maximum[part], self._total[part], self._picked[part])
            _add_sums(z, self._labels[part], *state, first_row, self._softmax)
            del z  # or the next chunk's logits would have memory of their own

    def loss(self) -> Tensor:
        """Of all tokens / denominator, fp32 []; after every slice was seen."""
        self._log_sum = self._maximum + torch.log(self._total)
        return (self._log_sum - self._picked).sum() / self._denominator

    def grads(
        self,
        first_row: int,
        weight: Tensor,
        bias: Tensor | None,
        *,
        weight_sum: Tensor | None,
        bias_sum: Tensor | None,
        overwrite: bool,
    ) -> None:
        """The gradients of a slice; after `loss`. weight_sum fp32 [Vs, H] and bias_sum fp32 [Vs] are added to, or with
        `overwrite` overwritten; None: not wanted."""
        assert self._log_sum is not None, "the loss must be asked for first"
        first = self._hidden_sum is None
        if self._hidden_sum is None:
            self._hidden_sum = torch.empty(self._hidden.shape, dtype=torch.float32, device=self._hidden.device)
        for total in (weight_sum, bias_sum):
            if total is not None and overwrite and self._hidden.shape[0] == 0:
                total.zero_()
        for part, h, z in self._chunks(weight, bias):
            dz = self._gradient(z, part, first_row)
            fresh = overwrite and part.start == 0
            _add_product(self._hidden_sum[part], dz, weight, overwrite=first)
            if weight_sum is not None:
                _add_product(weight_sum, dz.t(), h, overwrite=fresh)
            if bias_sum is not None:
                columns = dz.sum(0, dtype=torch.float32)
                bias_sum.copy_(columns) if fresh else bias_sum.add_(columns)
            del z, dz

    def hidden_grad(self) -> Tensor:
        """[n, H] in hidden's dtype; after every slice had its `grads`."""
        assert self._hidden_sum is not None, "no slice had its gradients yet"
        return self._hidden_sum.to(self._hidden.dtype)

    def _chunks(self, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, self._hidden.shape[0], self._chunk):
            part = slice(start, start + self._chunk)
            h = self._hidden[part]
            yield part, h, torch.nn.functional.linear(h, weight, bias)

    def _gradient(self, z: Tensor, part: slice, first_row: int) -> Tensor:
        assert self._log_sum is not None
        labels, log_sum, factor = self._labels[part], self._log_sum[part], 1.0 / self._denominator
        if z.is_cuda:
            from slideformer.kernels.softmax_gradient import gradient_of_slice_

            scale, softcap = self._softmax.scale, self._softmax.softcap
            gradient_of_slice_(z, labels, log_sum, first_column=first_row, scale=scale, softcap=softcap, factor=factor)
            return z
        logits = self._softmax.logits(z)
        grad = torch.exp(logits - log_sum[:, None])
        here = _in_slice(labels, first_row, z.shape[1])
        grad[here, labels[here] - first_row] -= 1.0
        return self._softmax.chain(grad.mul_(factor), logits).to(z.dtype)


def _in_slice(labels: Tensor, first_row: int, num_rows: int) -> Tensor:
    return (labels >= first_row) & (labels < first_row + num_rows)


def _add_sums(
    z: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, picked: Tensor, first_row: int, softmax: Softmax
) -> None:
    """Maximum, sum of exponentials above it and the label's logit, in place, with a slice's z [n, Vs] taken in."""
    if z.is_cuda:
        from slideformer.kernels.softmax_gradient import add_softmax_sums_

        scale, softcap = softmax.scale, softmax.softcap
        add_softmax_sums_(z, labels, maximum, total, picked, first_column=first_row, scale=scale, softcap=softcap)
        return
    logits = softmax.logits(z)
    new = torch.maximum(maximum, logits.amax(1))
    total.mul_(torch.exp(maximum - new)).add_(torch.exp(logits - new[:, None]).sum(1))
    maximum.copy_(new)
    here = _in_slice(labels, first_row, z.shape[1])
    picked[here] = logits[here, labels[here] - first_row]


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


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, overwrite: bool) -> None:
    """total (fp32) (+)= a @ b, summed in fp32."""
    if a.dtype is torch.float32:
        torch.addmm(total, a, b, beta=0.0 if overwrite else 1.0, out=total)
    elif a.is_cuda:
        if overwrite:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:  # a bf16 matrix product on the CPU cannot write fp32
        product = torch.mm(a.float(), b.float())
        total.copy_(product) if overwrite else total.add_(product)
