"""Loss and gradients of the head against float64 autograd of the plain expression, element by element.

Every element may be off by what a standard rounding analysis allows and no more (Higham, Accuracy and Stability,
chapter 3): a sum of k products is off by gamma(k) = k u / (1 - k u) times the sum of absolute values, u = 2**-24. What
is rounded to bf16 is off by 2**-8 more. The bounds below follow the expression: z, logits, softmax, dz, products of dz.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slideformer.kernels.linear_cross_entropy import (
    CHUNK_TOKENS,
    SlicedLoss,
    Softmax,
    chunk_tokens,
    loss_and_grads,
    loss_only,
)

U = 2.0**-24
BF16 = 2.0**-8
DENOMINATOR = 50.0

PLAIN, CAPPED, SCALED, BOTH = Softmax(), Softmax(softcap=3.0), Softmax(scale=0.125), Softmax(scale=4.0, softcap=5.0)
SOFTMAX = pytest.mark.parametrize("softmax", [PLAIN, CAPPED, SCALED, BOTH], ids=["plain", "capped", "scaled", "both"])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# tokens, width, vocabulary, chunk
SHAPE = pytest.mark.parametrize(
    "shape", [(1, 16, 2, 1), (7, 33, 5, 3), (64, 64, 307, 64), (65, 24, 1000, 64), (50, 16, 37, 4096), (5, 300, 3, 1)]
)
BIAS = pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])


def gamma(k: int) -> float:
    return k * U / (1 - k * U)


@dataclass
class Exact:
    """In float64, from inputs as they are. errors: the most that each may be off."""

    loss: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    errors: dict[str, torch.Tensor]


def inputs(shape, dtype, with_bias, generator, *, spread: float = 1.0):
    n, width, vocab, _ = shape
    hidden = torch.randn(n, width, generator=generator).to(dtype)
    weight = (torch.randn(vocab, width, generator=generator) * spread / width**0.5).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype) if with_bias else None
    return hidden, weight, bias, torch.randint(vocab, (n,), generator=generator)


def exact(hidden, weight, bias, labels, softmax: Softmax, dtype) -> Exact:
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    b = None if bias is None else bias.double().requires_grad_()
    z = torch.nn.functional.linear(h, w, b) * softmax.scale
    logits = z if softmax.softcap is None else softmax.softcap * torch.tanh(z / softmax.softcap)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / DENOMINATOR
    grads = torch.autograd.grad(loss, [h, w, *([] if b is None else [b])])
    with torch.no_grad():
        errors = bounds(h, w, b, labels, logits, softmax, BF16 if dtype is torch.bfloat16 else 0.0)
    return Exact(loss.detach(), grads[0], grads[1], grads[2] if b is not None else None, errors)


def bounds(h, w, b, labels, logits, softmax: Softmax, rounding: float) -> dict[str, torch.Tensor]:
    """rounding: of z, dz and the gradient for hidden to the compute dtype."""
    n, width = h.shape
    vocab = w.shape[0]
    size_z = h.abs() @ w.abs().T + (0 if b is None else b.abs())
    error_z = (gamma(width + 1) + rounding) * size_z
    error_logits = softmax.scale * error_z + 4 * U * logits.abs()  # softcap is no steeper than 1; a few ulp of its own
    p = torch.softmax(logits, dim=1)
    # log-sum-exp is as far off as the worst logit, and by a sum of V terms
    error_lse = error_logits.amax(1, keepdim=True) + gamma(vocab + 4) + 2 * U * torch.logsumexp(logits, 1, True).abs()
    error_losses = error_lse.squeeze(1) + error_logits.gather(1, labels[:, None]).squeeze(1)
    losses = torch.logsumexp(logits, 1) - logits.gather(1, labels[:, None]).squeeze(1)
    error_loss = (error_losses.sum() + gamma(n + 2) * losses.sum()) / DENOMINATOR
    relative = torch.expm1(error_logits + error_lse) + 4 * U  # of a probability
    g = (p - torch.nn.functional.one_hot(labels, vocab)) / DENOMINATOR
    error_g = (p * relative + 2 * U * (p + 1)) / DENOMINATOR
    slope, error_slope = torch.ones_like(g), torch.zeros_like(g)
    if softmax.softcap is not None:
        share = logits.abs() / softmax.softcap
        slope, error_slope = 1 - share**2, 2 * share * error_logits / softmax.softcap + 4 * U
    dz = g * slope * softmax.scale
    error_dz = softmax.scale * (error_g * slope + (g.abs() + error_g) * error_slope + 3 * U * g.abs())
    error_dz = error_dz + rounding * (dz.abs() + error_dz)
    error_hidden = error_dz @ w.abs() + gamma(vocab) * ((dz.abs() + error_dz) @ w.abs())
    error_hidden = error_hidden + rounding * ((dz @ w).abs() + error_hidden)
    error_weight = error_dz.T @ h.abs() + gamma(2 * n) * ((dz.abs() + error_dz).T @ h.abs())
    error_bias = error_dz.sum(0) + gamma(2 * n) * (dz.abs() + error_dz).sum(0)
    return {"loss": error_loss, "hidden": error_hidden, "weight": error_weight, "bias": error_bias}


def assert_within(found: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, factor: float = 1.0) -> None:
    off = (found.double() - expected).abs()
    assert bool((off <= factor * error + 1e-300).all()), f"off by up to {float((off / error).max()):.2f} of the bound"


def run(hidden, weight, bias, labels, softmax, *, chunk, overwrite=True, weight_sum=None, **wanted):
    if weight_sum is None:
        weight_sum = torch.full(weight.shape, float("nan"))
    bias_sum = None if bias is None else torch.full(bias.shape, float("nan"))
    loss, hidden_grad = loss_and_grads(
        hidden, weight, bias, labels, softmax, denominator=DENOMINATOR, weight_sum=weight_sum, bias_sum=bias_sum,
        overwrite=overwrite, chunk=chunk, **wanted,
    )  # fmt: skip
    return loss, hidden_grad, weight_sum, bias_sum


@BIAS
@SOFTMAX
@DTYPE
@SHAPE
def test_loss_and_gradients_are_within_rounding_of_float64(shape, dtype, softmax, with_bias, generator):
    hidden, weight, bias, labels = inputs(shape, dtype, with_bias, generator)
    expected = exact(hidden, weight, bias, labels, softmax, dtype)
    loss, hidden_grad, weight_sum, bias_sum = run(hidden, weight, bias, labels, softmax, chunk=shape[-1])
    assert loss.dtype is torch.float32 and loss.shape == () and hidden_grad.dtype is dtype
    assert_within(loss, expected.loss, expected.errors["loss"])
    assert_within(hidden_grad, expected.hidden, expected.errors["hidden"])
    assert_within(weight_sum, expected.weight, expected.errors["weight"])
    if bias_sum is not None:
        assert_within(bias_sum, expected.bias, expected.errors["bias"])
    total = loss_only(hidden, weight, bias, labels, softmax, chunk=shape[-1])
    assert_within(total / DENOMINATOR, expected.loss, expected.errors["loss"])


@SOFTMAX
@DTYPE
def test_the_bounds_are_tight_enough_to_mean_something(dtype, softmax, generator):
    """In fp32 far below the gradients themselves; and a softcap, scale or bias left out is seen."""
    hidden, weight, bias, labels = inputs((64, 64, 307, 64), dtype, True, generator)
    expected = exact(hidden, weight, bias, labels, softmax, dtype)
    share = {torch.float32: 1e-3, torch.bfloat16: 1.0}[dtype]
    for name in ("hidden", "weight", "bias"):
        value = getattr(expected, name)
        assert float(expected.errors[name].norm()) < share * float(value.norm()), name
    for other in (PLAIN, CAPPED, SCALED, BOTH):
        if other != softmax:
            found = run(hidden, weight, bias, labels, other, chunk=64)
            with pytest.raises(AssertionError):
                assert_within(found[1], expected.hidden, expected.errors["hidden"])
    with pytest.raises(AssertionError):
        assert_within(
            run(hidden, weight, None, labels, softmax, chunk=64)[1], expected.hidden, expected.errors["hidden"]
        )


@SOFTMAX
@DTYPE
def test_the_chunk_size_does_not_matter(dtype, softmax, generator):
    """But for the order of sums: each chunking is within the bound of float64, so two are within twice it."""
    hidden, weight, bias, labels = inputs((50, 24, 101, 0), dtype, True, generator)
    expected = exact(hidden, weight, bias, labels, softmax, dtype)
    whole = run(hidden, weight, bias, labels, softmax, chunk=50)
    for chunk in (1, 3, 49, 4096):
        parts = run(hidden, weight, bias, labels, softmax, chunk=chunk)
        for found, other, name in zip(parts, whole, ("loss", "hidden", "weight", "bias"), strict=True):
            assert_within(found, other.double(), expected.errors[name], factor=2.0)


@DTYPE
def test_calls_add_up(dtype, generator):
    """Three micro-batches, one of them empty: the weight gradient is their sum, the bias gradient each one's own."""
    hidden, weight, bias, labels = inputs((50, 24, 101, 0), dtype, True, generator)
    expected = exact(hidden, weight, bias, labels, PLAIN, dtype)
    weight_sum, losses, hidden_grads, bias_grads = torch.full(weight.shape, float("nan")), [], [], []
    for index, part in enumerate((slice(0, 20), slice(20, 20), slice(20, 50))):
        loss, hidden_grad, _, bias_sum = run(
            hidden[part], weight, bias, labels[part], PLAIN, chunk=7, overwrite=index == 0, weight_sum=weight_sum
        )
        losses.append(loss)
        hidden_grads.append(hidden_grad)
        bias_grads.append(bias_sum)
    assert float(losses[1]) == 0.0 and not bias_grads[1].any() and hidden_grads[1].shape == (0, 24)
    assert_within(sum(losses), expected.loss, expected.errors["loss"])
    assert_within(torch.cat(hidden_grads), expected.hidden, expected.errors["hidden"])
    assert_within(weight_sum, expected.weight, expected.errors["weight"])
    assert_within(sum(bias_grads), expected.bias, expected.errors["bias"])


@DTYPE
def test_no_token_at_all_overwrites_with_zeros(dtype):
    hidden, weight = torch.empty(0, 8, dtype=dtype), torch.ones(5, 8, dtype=dtype)
    labels = torch.empty(0, dtype=torch.int64)
    loss, hidden_grad, weight_sum, bias_sum = run(hidden, weight, torch.ones(5, dtype=dtype), labels, PLAIN, chunk=4)
    assert float(loss) == 0.0 and hidden_grad.shape == (0, 8)
    assert not weight_sum.any() and not bias_sum.any()
    assert float(loss_only(hidden, weight, None, labels, PLAIN)) == 0.0
    kept = torch.full((5, 8), 3.0)
    run(hidden, weight, None, labels, PLAIN, chunk=4, overwrite=False, weight_sum=kept)
    assert bool((kept == 3.0).all())


@SOFTMAX
def test_what_is_not_wanted_is_not_needed(softmax, generator):
    hidden, weight, bias, labels = inputs((20, 16, 37, 0), torch.float32, True, generator)
    full = run(hidden, weight, bias, labels, softmax, chunk=6)
    loss, hidden_grad = loss_and_grads(
        hidden, weight, bias, labels, softmax, denominator=DENOMINATOR, weight_sum=None, bias_sum=None, overwrite=True,
        chunk=6,
    )  # fmt: skip
    assert torch.equal(loss, full[0]) and torch.equal(hidden_grad, full[1])


@DTYPE
def test_inputs_are_left_alone(dtype, generator):
    given = inputs((20, 16, 37, 0), dtype, True, generator)
    before = [t.clone() for t in given]
    run(*given, BOTH, chunk=6)
    loss_only(*given, BOTH, chunk=6)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("spread", [30.0, 300.0])
def test_large_logits_do_not_overflow(spread, generator):
    """Probabilities of exactly 0 and 1, losses in the thousands."""
    hidden, weight, bias, labels = inputs((40, 16, 37, 0), torch.float32, True, generator, spread=spread)
    expected = exact(hidden, weight, bias, labels, PLAIN, torch.float32)
    loss, hidden_grad, weight_sum, _ = run(hidden, weight, bias, labels, PLAIN, chunk=16)
    assert float(loss) > 10
    assert_within(loss, expected.loss, expected.errors["loss"])
    assert_within(hidden_grad, expected.hidden, expected.errors["hidden"])
    assert_within(weight_sum, expected.weight, expected.errors["weight"])


def test_a_logit_that_is_not_finite_shows_in_the_loss(generator):
    for value in (float("nan"), float("inf")):
        hidden, weight, _, labels = inputs((10, 16, 37, 0), torch.float32, False, generator)
        hidden[3, 2] = value
        assert not torch.isfinite(run(hidden, weight, None, labels, PLAIN, chunk=4)[0])
        assert not torch.isfinite(loss_only(hidden, weight, None, labels, PLAIN, chunk=4))


def by_slices(hidden, weight, bias, labels, softmax, *, cuts, parts=1, chunk=7, order=None, device="cpu"):
    """As `run`, the projection never whole: slices between `cuts`, in any order, for `parts` micro-batches."""
    losses = [
        SlicedLoss(h, t, softmax, denominator=DENOMINATOR, chunk=chunk)
        for h, t in zip(hidden.tensor_split(parts), labels.tensor_split(parts), strict=True)
    ]
    edges = [0, *cuts, weight.shape[0]]
    slices = list(zip(edges, edges[1:], strict=False))
    slices = [slices[i] for i in order or range(len(slices))]
    for a, b in slices:
        for loss in losses:
            loss.see(a, weight[a:b].clone(), None if bias is None else bias[a:b])
    total = sum(loss.loss() for loss in losses)
    weight_sum = torch.full(weight.shape, float("nan"), device=device)
    bias_sum = None if bias is None else torch.full(bias.shape, float("nan"), device=device)
    for a, b in slices:
        for index, loss in enumerate(losses):
            loss.grads(
                a, weight[a:b].clone(), None if bias is None else bias[a:b], weight_sum=weight_sum[a:b],
                bias_sum=None if bias_sum is None else bias_sum[a:b], overwrite=index == 0,
            )  # fmt: skip
    return total, torch.cat([loss.hidden_grad() for loss in losses]), weight_sum, bias_sum


@BIAS
@pytest.mark.parametrize("softmax", [PLAIN, BOTH], ids=["plain", "both"])
@DTYPE
@pytest.mark.parametrize(("cuts", "order"), [((1, 30, 31, 90), None), ((50,), (1, 0)), ((), None)], ids=str)
def test_by_slices_of_the_vocabulary_it_is_within_the_same_bounds(cuts, order, dtype, softmax, with_bias, generator):
    """Slices add less error than they save: the hidden gradient is rounded once, after all of them."""
    hidden, weight, bias, labels = inputs((24, 16, 97, 0), dtype, with_bias, generator)
    labels[:4] = torch.tensor([0, 1, 30, 96])  # at the edges of slices
    expected = exact(hidden, weight, bias, labels, softmax, dtype)
    for parts in (1, 3):
        found = by_slices(hidden, weight, bias, labels, softmax, cuts=cuts, order=order, parts=parts)
        assert found[0].dtype is torch.float32 and found[1].dtype is dtype
        for value, name in zip(found, ("loss", "hidden", "weight", "bias"), strict=True):
            if value is not None:
                assert_within(value, getattr(expected, name), expected.errors[name])


def test_by_slices_no_token_at_all_overwrites_with_zeros():
    hidden, weight, bias = torch.empty(0, 8), torch.ones(5, 8), torch.ones(5)
    found = by_slices(hidden, weight, bias, torch.empty(0, dtype=torch.int64), PLAIN, cuts=(2,))
    assert float(found[0]) == 0.0 and found[1].shape == (0, 8) and not found[2].any() and not found[3].any()


@pytest.mark.parametrize("spread", [30.0, 300.0])
def test_by_slices_large_logits_do_not_overflow(spread, generator):
    hidden, weight, bias, labels = inputs((40, 16, 37, 0), torch.float32, True, generator, spread=spread)
    expected = exact(hidden, weight, bias, labels, PLAIN, torch.float32)
    found = by_slices(hidden, weight, bias, labels, PLAIN, cuts=(5, 20))
    for value, name in zip(found, ("loss", "hidden", "weight", "bias"), strict=True):
        assert_within(value, getattr(expected, name), expected.errors[name])


def test_by_slices_what_is_not_wanted_is_not_needed(generator):
    hidden, weight, _, labels = inputs((20, 16, 37, 0), torch.float32, False, generator)
    loss = SlicedLoss(hidden, labels, PLAIN, denominator=DENOMINATOR)
    loss.see(0, weight, None)
    loss.loss()
    loss.grads(0, weight, None, weight_sum=None, bias_sum=None, overwrite=True)
    whole = run(hidden, weight, None, labels, PLAIN, chunk=20)
    assert_within(loss.hidden_grad(), whole[1].double(), whole[1].abs() * 1e-5 + 1e-8)


@pytest.mark.parametrize(
    ("tokens", "width", "multiprocessors", "chunk"),
    [
        (16384, 3072, 132, 2816),  # 22 x 12 tiles: two full rounds
        (32768, 3072, 132, 2816),
        (16384, 4096, 132, 3072),  # 24 x 16 tiles: three rounds, nearly full
        (3000, 3072, 132, 3000),
        (0, 64, 132, 1),
    ],
)
def test_a_chunks_tiles_fill_the_multiprocessors(tokens, width, multiprocessors, chunk):
    assert chunk_tokens(tokens, width, multiprocessors) == chunk


@given(tokens=st.integers(1, 100_000), width=st.integers(1, 20_000), multiprocessors=st.integers(1, 300))
def test_a_chunk_is_never_larger_than_its_memory_allows(tokens, width, multiprocessors):
    assert 1 <= chunk_tokens(tokens, width, multiprocessors) <= min(CHUNK_TOKENS, tokens)
