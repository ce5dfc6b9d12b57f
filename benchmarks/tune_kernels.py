"""Which launch shape of each memory-bound kernel is fastest on this GPU? Its answers are the constants in `kernels/`.

    python benchmarks/tune_kernels.py [--only rms_norm,rotary,glu,softmax,loss] [--widths 3072,4096,2048,128] [--top 4]

Every variant runs on 2^20 x 96 elements (bf16; the loss on 16,384 tokens), forward and backward apart, next to a plain
copy: a line says milliseconds and the share of the copy's bandwidth. Compiling takes most of the time, so it is done by
several processes first, into Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import util

import torch
from torch import Tensor

from kernels import WARMUP, Clock, limits
from slideformer.kernels import glu, linear_cross_entropy, rms_norm, rotary, softmax_gradient
from slideformer.kernels.rms_norm import Launch

STAGES = (2, 3)
ELEMENTWISE = ("rms_norm", "rotary", "glu", "softmax")


@dataclass(frozen=True)
class Variant:
    """One kernel with one launch shape. constants: of the module, set while it runs; none: as it is, or `name`. nbytes:
    what must be moved."""

    group: str
    constants: dict[str, object]
    work: Callable[[], object]
    nbytes: int
    module: object
    name: str = "as it is"

    @property
    def label(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.constants.items()) or self.name

    def _set(self, constants: dict[str, object]) -> None:
        for name, value in constants.items():
            setattr(self.module, name, value)
        for function in vars(self.module).values():  # sizes that follow from the constants are remembered
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    @contextmanager
    def chosen(self) -> Iterator[None]:
        before = {name: getattr(self.module, name) for name in self.constants}
        try:
            self._set(self.constants)
            yield
        finally:
            self._set(before)


@dataclass(frozen=True)
class Place:
    """Where variants run, and on how many elements."""

    device: torch.device
    numel: int

    def randn(self, *shape: int) -> Tensor:
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return torch.randn(shape, device=self.device).to(dtype)


def again(out: Tensor | tuple[Tensor, ...], leaves: list[Tensor], grads: list[Tensor]) -> Callable[[], object]:
    """Backward, over and over."""
    outs = list(out) if isinstance(out, tuple) else [out]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def without_graph(work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return work()

    return run


def norm_variants(place: Place, width: int) -> Iterator[Variant]:
    rows = place.numel // width
    x, add, grad, total_grad = (place.randn(rows, width) for _ in range(4))
    leaves = [x.requires_grad_(), add.requires_grad_(), place.randn(width).requires_grad_()]
    numbers = {"eps": 1e-6, "round_first": True, "overwrite_grad": True}
    plain = partial(rms_norm.rms_norm, x, leaves[2], **numbers)
    adds = partial(rms_norm.add_rms_norm, *leaves, **numbers)
    back = {
        "plain": (again(plain(), [x, leaves[2]], [grad]), 3),
        "add": (again(adds(), leaves, [total_grad, grad]), 4),
    }
    forward = [Launch(w, 1, 0) for w in (4, 8, 16)]
    forward += [Launch(w, s, p) for w, s, p in itertools.product((4, 8), STAGES, (2, 4, 8))]
    backward = [Launch(w, s, p) for w, s, p in itertools.product((4, 8, 16), (1, *STAGES), (1, 2, 3, 4, 6, 8))]
    for form, (work, times) in {"plain": (plain, 2), "add": (adds, 4)}.items():
        for launch in forward:
            group = f"rms_norm {form} forward, {rows} x {width}"
            yield Variant(group, {"FORWARD": launch}, without_graph(work), times * x.nbytes, rms_norm)
        for launch in backward:
            group = f"rms_norm {form} backward, {rows} x {width}"
            yield Variant(group, {"BACKWARD": launch}, back[form][0], back[form][1] * x.nbytes, rms_norm)


def rotary_variants(place: Place, heads: int, kv: int) -> Iterator[Variant]:
    length = min(1024, place.numel // ((heads + kv) * 128))
    rows = place.numel // ((heads + kv) * 128 * length)
    q, k = (place.randn(rows, length, n, 128).transpose(1, 2) for n in (heads, kv))
    angle = place.randn(1, length, 128)
    cos, sin = angle.cos(), angle.sin()
    work = without_graph(partial(rotary.rotary_, q, k, cos, sin, interleaved=False))
    group, nbytes = f"rotary, {heads}+{kv} heads", 2 * (q.nbytes + k.nbytes)
    for num_warps in (1, 2, 4, 8):
        yield Variant(group, {"NUM_WARPS": num_warps}, work, nbytes, rotary)
    if util.find_spec("liger_kernel") is not None and place.device.type != "cpu":
        from liger_kernel.ops.rope import LigerRopeFunction

        liger = without_graph(lambda: LigerRopeFunction.apply(q, k, cos, sin))
        yield Variant(group, {}, liger, nbytes, rotary, "liger")


def glu_variants(place: Place, width: int) -> Iterator[Variant]:
    gate, up, grad = (place.randn(place.numel // width, width) for _ in range(3))
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    work = partial(glu.glu, *leaves, activation="silu")
    back = again(work(), leaves, [grad])
    shapes = [(block, warps) for block in (1024, 2048, 4096, 8192) for warps in (4, 8, 16) if block >= 128 * warps]
    chosen = [{"MAX_BLOCK": block, "WHOLE_BLOCK": block, "WARP_NUMEL": block // warps} for block, warps in shapes]
    for constants in ({}, *chosen):
        yield Variant(f"glu forward, {width}", constants, without_graph(work), 3 * gate.nbytes, glu)
        yield Variant(f"glu backward, {width}", constants, back, 5 * gate.nbytes, glu)


def softmax_variants(place: Place, rows: int, vocab: int) -> Iterator[Variant]:
    z, labels = place.randn(rows, vocab), torch.arange(rows, device=place.device) % vocab
    work = partial(softmax_gradient.softmax_gradient_, z, labels, scale=1.0, softcap=None, factor=1.0)
    for block, num_warps in itertools.product((4096, 8192, 16384, 32768), (8, 16, 32)):
        constants = {"MAX_BLOCK": block, "NUM_WARPS": num_warps}
        yield Variant(f"softmax gradient, {rows} x {vocab}", constants, work, 3 * z.nbytes, softmax_gradient)


def loss_variants(place: Place, vocab: int, width: int, tokens: int = 16384) -> Iterator[Variant]:
    hidden, weight, labels = (
        place.randn(tokens, width),
        place.randn(vocab, width) * 0.02,
        torch.arange(tokens, device=place.device) % vocab,
    )
    total = torch.empty(vocab, width, device=place.device)

    def work(chunk: int | None) -> object:
        return linear_cross_entropy.loss_and_grads(
            hidden, weight, None, labels, linear_cross_entropy.Softmax(), denominator=float(tokens), weight_sum=total,
            bias_sum=None, overwrite=True, chunk=chunk,
        )  # fmt: skip

    for chunk in (None, 1408, 2048, 2816, 3072, 4096):
        group = f"linear cross entropy, {tokens} tokens, {vocab} x {width}"
        name = f"chunks of {chunk}" if chunk else "as it is"
        yield Variant(group, {}, partial(work, chunk), 0, linear_cross_entropy, name)


def groups(args: argparse.Namespace, only: list[str]) -> Iterator[Callable[[], Iterator[Variant]]]:
    place = Place(torch.device(args.device), args.numel)
    if "rms_norm" in only:
        yield from (partial(norm_variants, place, width) for width in args.widths)
    if "rotary" in only:
        yield from (partial(rotary_variants, place, heads, 8) for heads in (24, 32))
    if "glu" in only:
        yield from (partial(glu_variants, place, width) for width in (8192, 12288) if width <= place.numel)
    if "softmax" in only:
        yield partial(softmax_variants, place, *((2048, 128256) if place.device.type != "cpu" else (4, 5000)))
    if "loss" in only:
        yield partial(loss_variants, place, *((128256, 3072) if place.device.type != "cpu" else (64, 32, 16)))


def compile_part(args: argparse.Namespace, part: int, parts: int) -> None:
    for make in groups(args, [op for op in args.only if op in ELEMENTWISE]):
        for index, variant in enumerate(make()):
            if index % parts == part:
                with variant.chosen():
                    variant.work()


def compile_all(args: argparse.Namespace) -> None:
    """Programs of a multiprocessor are no constant of the compiled kernel, but trying them once more costs nothing."""
    parts = max(min((os.cpu_count() or 2) // 2, 8), 1)
    command = [sys.executable, *sys.argv, "--part"]
    processes = [subprocess.Popen([*command, str(part), str(parts)]) for part in range(parts)]
    if any(process.wait() for process in processes):
        raise SystemExit("a variant did not compile or run")


def measure(variants: Iterator[Variant], clock: Clock, copy_gbps: float, args: argparse.Namespace) -> None:
    found: dict[str, list[tuple[float, Variant]]] = {}
    for variant in variants:
        with variant.chosen():
            times = [clock.ms(variant.work) for _ in range(WARMUP + args.reps)][WARMUP:]
        found.setdefault(variant.group, []).append((statistics.median(times), variant))
    for group, measured in found.items():
        print(f"{group}, {len(measured)} variants", flush=True)
        measured.sort(key=lambda one: one[0])
        default = [one for one in measured if all(getattr(one[1].module, k) == v for k, v in one[1].constants.items())]
        for ms, variant in [*measured[: args.top], *(one for one in default if one not in measured[: args.top])]:
            share = f"{variant.nbytes / ms / 1e6 / copy_gbps:.3f} of the copy  " if variant.nbytes else ""
            now = "  (now)" if (ms, variant) in default and variant.constants else ""
            print(f"  {ms:8.4f} ms  {share}{variant.label}{now}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda s: s.split(","), default=[*ELEMENTWISE, "loss"])
    parser.add_argument("--widths", type=lambda s: [int(w) for w in s.split(",")], default=[3072, 4096, 2048, 128])
    parser.add_argument("--top", type=int, default=4, help="variants told of each kernel")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--numel", type=int, default=96 << 20)
    parser.add_argument("--device", default="cuda", help="cpu (with TRITON_INTERPRET=1) only tries the script")
    parser.add_argument("--part", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.part:
        return compile_part(args, *args.part)
    compile_all(args)
    clock = Clock(torch.device(args.device))
    limit = limits(clock, args.reps)
    print(f"torch {torch.__version__}: a copy makes {limit['copy_gbps']} GB/s", flush=True)
    for make in groups(args, args.only):
        measure(make(), clock, limit["copy_gbps"], args)
        if args.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
