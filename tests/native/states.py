"""Tiles for the tests of the update: values that hurt, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slideformer.optim import Hyper, split

HYPER = Hyper(lr=1e-3, weight_decay=0.1, step=3, grad_scale=300.7)
GRAD_DTYPES = (None, torch.bfloat16, torch.float32)


def instruction_sets() -> list[str]:
    """What this machine can run, slowest first, read from the kernel rather than from our library."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = {flag for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}
    return ["baseline"] + [
        name for name, flag in (("avx2", "avx2"), ("avx512", "avx512f"), ("neon", "asimd")) if flag in flags
    ]


def ordinary(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator) * 1e-3


def any_bits(numel: int, generator: torch.Generator) -> Tensor:
    """Every kind of fp32: NaN of both signs and all payloads, infinities, denormals, both zeros."""
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    special = torch.tensor([0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x007FFFFF])
    return torch.where(
        torch.rand(numel, generator=generator) < 0.2,
        special[torch.randint(len(special), (numel,), generator=generator)].to(torch.int32),
        bits,
    ).view(torch.float32)


def near_flushing(numel: int, generator: torch.Generator) -> Tensor:
    """Values whose product with a factor of HYPER is within an ulp of 2**-126, where hardware flushes, or of 2**-125,
    where we do."""
    s = HYPER.scalars()
    factors = (s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.decay, s.step_size, s.grad_scale, 1.0)
    centres = torch.tensor([edge / factor for factor in factors for edge in (2.0**-126, 2.0**-125)])
    centres = centres[torch.randint(len(centres), (numel,), generator=generator)].view(torch.int32)
    values = (centres + torch.randint(-2, 3, (numel,), generator=generator)).to(torch.int32).view(torch.float32)
    return torch.where(torch.rand(numel, generator=generator) < 0.5, values, -values)


def mixed(numel: int, generator: torch.Generator) -> Tensor:
    """Of the three above or around one, independently for every element."""
    kinds = [values(numel, generator) for values in (ordinary, any_bits, near_flushing)]
    kinds.append(torch.rand(numel, generator=generator) * 16)
    return torch.stack(kinds).gather(0, torch.randint(4, (1, numel), generator=generator))[0]


Values = Callable[[int, torch.Generator], Tensor]


class State:
    """Planes, moments and gradient of one tile, all with values of one kind."""

    def __init__(self, numel: int, grad_dtype: torch.dtype | None, values: Values, generator: torch.Generator) -> None:
        self.weight = torch.empty(numel, dtype=torch.bfloat16)
        self.residual = torch.empty(numel, dtype=torch.int16)
        split(values(numel, generator), self.weight, self.residual)
        self.grad = None if grad_dtype is None else values(numel, generator).to(grad_dtype)
        self.exp_avg = values(numel, generator)
        self.exp_avg_sq = values(numel, generator).abs()

    def args(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """In the order of `HostKernels.update`."""
        return self.weight, self.residual, self.grad, self.exp_avg, self.exp_avg_sq

    def planes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.weight, self.residual, self.exp_avg, self.exp_avg_sq

    def slice(self, start: int, stop: int) -> State:
        """A view of elements [start, stop): what is written to it is written to this."""
        part = State.__new__(State)
        for name, tensor in vars(self).items():
            setattr(part, name, None if tensor is None else tensor[start:stop])
        return part

    def clone(self) -> State:
        copy = State.__new__(State)
        for name, tensor in vars(self).items():
            setattr(copy, name, None if tensor is None else tensor.clone())
        return copy


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(found: State, expected: State) -> None:
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
        a, b = bits(getattr(found, name)), bits(getattr(expected, name))
        wrong = (a != b).nonzero()
        assert len(wrong) == 0, f"{name} differs in {len(wrong)} of {a.numel()}, first at {wrong[0].tolist()}"
