"""The specification of the update: against torch.optim.AdamW, and on its own terms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from native.states import HYPER, mixed, near_flushing
from slideformer.optim import Hyper, join, reference_update, reference_update_rows, split

U = 2.0**-24  # the relative error of one rounding to fp32


class Master:
    """A parameter kept as planes and moments, on the specification's side."""

    def __init__(self, value: Tensor) -> None:
        self.weight, self.residual = value.bfloat16(), torch.empty_like(value, dtype=torch.int16)
        split(value, self.weight, self.residual)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(value), torch.zeros_like(value)

    def update(self, grad: Tensor | None, hyper: Hyper) -> None:
        reference_update(self.weight, self.residual, grad, self.exp_avg, self.exp_avg_sq, hyper)

    @property
    def value(self) -> Tensor:
        return join(self.weight, self.residual)


def error_bound(start: Tensor, grads: list[Tensor], hypers: list[Hyper]) -> Tensor:
    """How far two correct fp32 implementations of these steps can end from each other, per element.

    To first order in U, with G the largest gradient of the element, P its largest weight:
    - exp_avg: ours rounds two products, one sum and two factors, torch's lerp a difference, a product and a sum; the
      two differ by at most 8 U G in a step, and a step keeps beta1 of what was there: 8 U G / (1 - beta1) in all.
    - exp_avg_sq has only positive terms, so relative errors do not grow by cancellation: at most 5 roundings a step
      and side, so 10 U (step + 1), halved by the root.
    - denominator, quotient, factors and product: at most 8 more roundings on either side, 16 U.
    - the weight: the decay's factor, product and difference, 3 U P a step and side: 6 U P.
    """
    m, v, p = torch.zeros_like(start), torch.zeros_like(start), start.double()
    biggest_grad = torch.stack(grads).abs().amax(0).double()
    bound, biggest_weight = torch.zeros_like(p), p.abs()
    for grad, h in zip(grads, hypers, strict=True):
        g = grad.double()
        m, v = h.beta1 * m + (1 - h.beta1) * g, h.beta2 * v + (1 - h.beta2) * g * g
        denom = (v / (1 - h.beta2**h.step)).sqrt() + h.eps
        step_size = h.lr / (1 - h.beta1**h.step)
        p = p * (1 - h.lr * h.weight_decay) - step_size * m / denom
        biggest_weight = torch.maximum(biggest_weight, p.abs())
        bound += step_size / denom * (8 * U * biggest_grad / (1 - h.beta1) + m.abs() * U * (5 * (h.step + 1) + 16))
        bound += 6 * U * biggest_weight
    return 1.01 * bound + 2.0**-149


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_two_groups_under_a_schedule_agree_with_torch(max_grad_norm, grad_dtype, generator):
    """One tile a parameter."""
    num_steps, numel = 12, 4000
    scales = 10 ** torch.linspace(-7, 0, numel)  # from gradients below eps to ones far above it
    starts = [torch.randn(numel, generator=generator) * 0.05 for _ in range(2)]
    decays = (0.1, 0.0)
    theirs = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": decay} for p, decay in zip(theirs, decays, strict=True)],
        betas=(0.9, 0.95),
        eps=1e-6,
        foreach=False,
    )
    ours = [Master(start) for start in starts]
    grads, hypers = ([], []), ([], [])
    for step in range(1, num_steps + 1):
        lr = 1e-3 * (1 + math.cos(math.pi * step / num_steps)) / 2 + 1e-5
        for parameter in theirs:
            parameter.grad = (torch.randn(numel, generator=generator) * scales).to(grad_dtype).float()
        fresh, scale = [parameter.grad.clone().to(grad_dtype) for parameter in theirs], 1.0
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm)
            scale = float(torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0))
            assert scale < 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for i, master in enumerate(ours):
            hyper = Hyper(lr, 0.9, 0.95, 1e-6, decays[i], step, scale)
            master.update(fresh[i], hyper)
            hypers[i].append(hyper)
            grads[i].append(theirs[i].grad.clone())
    for i, master in enumerate(ours):
        bound = error_bound(starts[i], grads[i], hypers[i])
        off = (master.value.double() - theirs[i].detach().double()).abs()
        moved = (master.value - starts[i]).abs()
        assert (off <= bound).all(), f"group {i}: {(off / bound).max():.2f} of the bound"
        assert bound.median() < 1e-3 * moved.median(), "the bound is so wide that it would let a wrong update pass"


def test_a_hundred_steps_of_unit_sign_move_a_small_weight_by_a_thousandth():
    """A bf16 weight would not move: half its spacing at 0.02 is 6e-5, six times the step."""
    master = Master(torch.full((64,), 0.02))
    for step in range(1, 101):
        master.update(torch.ones(64), Hyper(1e-5, step=step))
    # One rounding of the weight a step, at most half of fp32's spacing at 0.02 (2**-30), and eps and the few roundings
    # of the step itself, which are below 1e-6 of it.
    assert (0.02 - master.value.double() - 1e-3).abs().max() <= 100 * 2.0**-30 + 1e-6 * 1e-3
    assert (torch.full((64,), 0.02).bfloat16() - 1e-5 == torch.full((64,), 0.02).bfloat16()).all()


def test_split_and_join_are_exact_for_every_upper_half_and_around_every_tie():
    """The lower half acts through its carry at 0x8000 only, so these 16 of it stand for all 65,536."""
    low = torch.tensor(
        [0, 1, 2, 0x1234, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xBFFF, 0xC000, 0xFFFD]
    )
    low = torch.cat([low, torch.tensor([0xFFFE, 0xFFFF])])
    master = ((torch.arange(65536)[:, None] << 16) + low).to(torch.int32).flatten().view(torch.float32)
    weight, residual = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master, weight, residual)
    assert torch.equal(join(weight, residual).view(torch.int32), master.view(torch.int32))
    nearest = master.bfloat16().view(torch.int16)
    differs = (weight.view(torch.int16) != nearest) & ~master.isnan()
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    away = ties & ((master.view(torch.int32) >> 16) % 2 == 0) & ~master.isnan()
    assert torch.equal(differs, away)
    assert differs.sum() == 32_640


def test_a_gradient_scale_is_the_scaled_gradient(generator: torch.Generator):
    start, grad = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    scaled, plain = Master(start), Master(start)
    factor = torch.tensor(0.37)
    scaled.update(grad, Hyper(1e-3, grad_scale=float(factor)))
    plain.update(grad * factor, Hyper(1e-3))
    assert torch.equal(scaled.value, plain.value)
    assert torch.equal(scaled.exp_avg_sq, plain.exp_avg_sq)


def test_no_gradient_is_a_gradient_of_zero(generator: torch.Generator):
    start = torch.randn(1000, generator=generator)
    none, zero = Master(start), Master(start)
    for master in (none, zero):
        master.update(torch.randn(1000, generator=generator.manual_seed(1)), Hyper(1e-3))
    none.update(None, Hyper(1e-3, weight_decay=0.1, step=2, grad_scale=math.nan))
    zero.update(torch.zeros(1000), Hyper(1e-3, weight_decay=0.1, step=2))
    assert torch.equal(none.value, zero.value)
    assert torch.equal(none.exp_avg, zero.exp_avg)


@pytest.mark.parametrize("values", [mixed, near_flushing])
def test_the_result_does_not_depend_on_the_hardwares_flushing(values, generator: torch.Generator):
    start, grad = values(50_000, generator), values(50_000, generator)
    left_alone, flushed = Master(start), Master(start)
    left_alone.update(grad, HYPER)
    assert torch.set_flush_denormal(True)
    try:
        flushed.update(grad, HYPER)
    finally:
        torch.set_flush_denormal(False)
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
        found, expected = getattr(flushed, name), getattr(left_alone, name)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
    assert ((left_alone.value.abs() < 2.0**-125) == (left_alone.value == 0)).all()


def test_a_nan_shows_in_the_bf16_plane():
    for pattern in (0x7F800001, 0x7FFFFFFF, -1):
        master = Master(torch.zeros(4))
        master.update(torch.full((4,), pattern, dtype=torch.int32).view(torch.float32), Hyper(1e-3))
        assert master.weight.isnan().all()
        assert (master.value.view(torch.int32) == 0x7FC00000).all()


def test_rows_without_a_gradient_row_get_a_gradient_of_zero(generator: torch.Generator):
    master = Master(torch.randn(5, 3, generator=generator))
    master.exp_avg.fill_(0.5)
    before = master.value.clone()
    grad = torch.randn(2, 3, generator=generator)
    planes = (master.weight, master.residual, master.exp_avg, master.exp_avg_sq)
    reference_update_rows(*planes, torch.tensor([4, 0, 2]), grad, torch.tensor([1, -1, 0]), Hyper(1e-3))
    assert torch.equal(master.value[[1, 3]], before[[1, 3]])
    assert torch.allclose(master.exp_avg[4], 0.45 + 0.1 * grad[1])
    assert torch.allclose(master.exp_avg[2], 0.45 + 0.1 * grad[0])
    assert torch.allclose(master.exp_avg[0], torch.tensor(0.45))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1e-3}, "lr is -0.001, must be 0 or more"),
        ({"lr": math.nan}, "lr is nan, must be 0 or more"),
        ({"lr": 1e-3, "beta1": 1.0}, "beta1 is 1.0, must be at least 0 and less than 1"),
        ({"lr": 1e-3, "beta2": -0.1}, "beta2 is -0.1, must be at least 0 and less than 1"),
        ({"lr": 1e-3, "eps": -1.0}, "eps is -1.0, must be 0 or more"),
        ({"lr": 1e-3, "weight_decay": -0.1}, "weight_decay is -0.1, must be 0 or more"),
        ({"lr": 2.0, "weight_decay": 0.6}, "lr . weight_decay is 1.2, must be at most 1"),
        ({"lr": 1e-3, "step": 0}, "step is 0, must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(arguments: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        Hyper(**arguments)
