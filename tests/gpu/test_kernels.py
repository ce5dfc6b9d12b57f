"""The kernels on the GPU, in bf16 too, at real sizes: the same checks as on the CPU.

test_losses.py trains with them; benchmarks/kernels.py has the speeds.
"""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import CONVENTIONS, check_glu, check_rms_norm, check_rotary
from kernels.test_linear_cross_entropy import DENOMINATOR, PLAIN, SCALED, assert_within, by_slices, exact
from slideformer.kernels.linear_cross_entropy import SlicedLoss, Softmax, loss_and_grads, loss_only
from slideformer.kernels.rms_norm import rms_norm


def sizes(*of_bf16: tuple, others: int = 1) -> pytest.MarkDecorator:
    """bf16 at every size, the other dtypes at the first few: most of the time goes to compiling."""
    given = [(size, torch.bfloat16) for size in of_bf16]
    given += [(size, dtype) for size in of_bf16[:others] for dtype in (torch.float16, torch.float32)]
    names = [f"{size}-{dtype}".removeprefix("torch.") for size, dtype in given]
    return pytest.mark.parametrize(("size", "dtype"), given, ids=names)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
@sizes((5, 123, 123), (4096, 3072), (2, 1024, 32, 128), (300, 4097), (7, 20_000), others=2)
def test_rms_norm(size, adds, convention, dtype):
    check_rms_norm(dtype, size, "cuda", convention=convention, adds=adds, overwrite_grad=True)


def test_the_norms_weight_gradient_has_the_same_bits_every_time():
    """Pairs of programs add to one row of sums, in whatever order they come."""
    x, grad = (torch.randn(32768, 3072, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(3072, device="cuda").bfloat16().requires_grad_()
    found = [torch.autograd.grad(rms_norm(x, weight, eps=1e-6), weight, grad)[0] for _ in range(20)]
    assert all(torch.equal(again, found[0]) for again in found)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("sequence_first", [True, False], ids=["", "heads first"])
@sizes(((1, 5, 1, 77, 20), 6), ((4, 24, 8, 1024, 128), 128), ((2, 32, 32, 123, 80), 32))
def test_rotary(size, sequence_first, interleaved, dtype):
    size, rotary_dim = size
    check_rotary(dtype, size, "cuda", interleaved=interleaved, rotary_dim=rotary_dim, sequence_first=sequence_first)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
@sizes((5, 123, 123), (4096, 8192), (100, 4097))
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_glu(scale, size, halves, activation, dtype):
    check_glu(dtype, size, "cuda", activation=activation, halves=halves, scale=scale)


@pytest.mark.parametrize("softmax", [PLAIN, SCALED, Softmax(softcap=30.0), Softmax(scale=4.0, softcap=5.0)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [(300, 512, 32_003), (5, 123, 123)], ids=str)
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_linear_cross_entropy_in_bf16(sliced, size, with_bias, softmax):
    tokens, width, vocab = size
    generator = torch.Generator("cuda").manual_seed(0)
    randn = lambda *s: torch.randn(s, generator=generator, device="cuda")  # noqa: E731
    hidden, weight = randn(tokens, width).bfloat16(), (randn(vocab, width) / width**0.5).bfloat16()
    bias = randn(vocab).bfloat16() if with_bias else None
    labels = torch.randint(vocab, (tokens,), generator=generator, device="cuda")
    expected = exact(hidden, weight, bias, labels, softmax, torch.bfloat16)
    if sliced:
        cuts = (1, vocab // 3, vocab // 2)
        found = by_slices(hidden, weight, bias, labels, softmax, cuts=cuts, parts=2, chunk=128, device="cuda")
    else:
        weight_sum = torch.full((vocab, width), float("nan"), device="cuda")
        bias_sum = None if bias is None else torch.full((vocab,), float("nan"), device="cuda")
        loss, hidden_grad = loss_and_grads(
            hidden, weight, bias, labels, softmax, denominator=DENOMINATOR, weight_sum=weight_sum, bias_sum=bias_sum,
            overwrite=True, chunk=128,
        )  # fmt: skip
        found = (loss, hidden_grad, weight_sum, bias_sum)
    for value, name in zip(found, ("loss", "hidden", "weight", "bias"), strict=True):
        if value is not None:
            assert_within(value, getattr(expected, name), expected.errors[name])


def peak_nbytes(work) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_the_loss_does_not_depend_on_the_number_of_chunks():
    """But for the hidden gradient (2 bytes x width) and a few words a token: it is one chunk's logits."""
    vocab, width, chunk = 32_000, 512, 256
    weight = torch.randn(vocab, width, device="cuda").bfloat16()
    weight_sum = torch.empty(vocab, width, device="cuda")

    def peak(num_chunks: int) -> int:
        hidden = torch.randn(num_chunks * chunk, width, device="cuda").bfloat16()
        labels = torch.randint(vocab, (num_chunks * chunk,), device="cuda")
        run = lambda: loss_and_grads(  # noqa: E731
            hidden, weight, None, labels, PLAIN, denominator=1.0, weight_sum=weight_sum, bias_sum=None, overwrite=True,
            chunk=chunk,
        )  # fmt: skip
        run()
        return peak_nbytes(run) - hidden.nbytes

    assert abs(peak(16) - peak(2)) <= 1 << 20
    assert peak(16) <= chunk * vocab * 2 + (1 << 20)


def test_memory_of_the_loss_alone_is_one_chunks_logits():
    vocab, width, chunk = 32_000, 512, 256
    weight, hidden = (torch.randn(n, width, device="cuda").bfloat16() for n in (vocab, 16 * chunk))
    labels = torch.randint(vocab, (16 * chunk,), device="cuda")
    run = lambda: loss_only(hidden, weight, None, labels, PLAIN, chunk=chunk)  # noqa: E731
    run()
    assert peak_nbytes(run) <= chunk * vocab * 2 + (1 << 20)


def test_by_slices_neither_projection_nor_gradient_is_whole():
    vocab, width, tokens, step = 64_000, 1024, 1024, 8000
    weight = torch.randn(vocab, width).bfloat16().pin_memory()
    hidden = torch.randn(tokens, width, device="cuda").bfloat16()
    labels = torch.randint(vocab, (tokens,), device="cuda")

    def run() -> None:
        loss = SlicedLoss(hidden, labels, PLAIN, denominator=1.0)
        for a in range(0, vocab, step):
            loss.see(a, weight[a : a + step].cuda(), None)
        loss.loss()
        grad = torch.empty(step, width, device="cuda")
        for a in range(0, vocab, step):
            loss.grads(a, weight[a : a + step].cuda(), None, weight_sum=grad, bias_sum=None, overwrite=True)
        loss.hidden_grad()

    run()
    slice_nbytes = step * width * (2 + 4) + tokens * step * 2  # of projection and gradient, and the logits
    assert peak_nbytes(run) <= 1.1 * (slice_nbytes + step * width * 2 + tokens * width * 8)
    assert peak_nbytes(run) < vocab * width * 2
