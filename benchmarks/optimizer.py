"""How fast does the host update parameters, and how near is that to the speed of its memory?

    python benchmarks/optimizer.py [--numel N] [--tile N] [--threads 1,2,4] [--steps N] --out results.jsonl

One JSON line for each case and thread count, all of one call under one `run`: the native update with a bf16 gradient
beside `stream`, a loop that moves the same 26 bytes a parameter and computes nothing (the two alternate, so that both
meet the same machine); other gradients and instruction sets; torch's fused AdamW on fp32; the torch stand-in.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lines import host_peak_gib, new_run, shared, spread, write
from slideformer.native import NativeKernels, Planes, TorchKernels, available_cpus, load
from slideformer.optim import Hyper, split

HYPER = Hyper(1e-4, weight_decay=0.1, step=10)
GRAD_NBYTES = {torch.bfloat16: 2, torch.float32: 4, None: 0}
STATE_NBYTES = 24  # read and written: 2 + 2 + 4 + 4


class Tiles:
    """State of `numel` parameters in exact-size memory on huge pages, as the engine's arenas are, cut into tiles."""

    def __init__(self, numel: int, tile_numel: int) -> None:
        self.numel, self.tile_numel = numel, tile_numel
        self.weight, self.residual = self._filled(torch.bfloat16), self._filled(torch.int16)
        self.grad, self.grad_fp32 = self._filled(torch.bfloat16), self._filled(torch.float32)
        self.exp_avg, self.exp_avg_sq = self._filled(torch.float32), self._filled(torch.float32)
        generator = torch.Generator().manual_seed(0)
        for part in self._slices(
            1 << 20
        ):  # the same million values again and again: filling takes longer than measuring
            values = torch.randn(part.stop - part.start, generator=generator)
            split(values * 0.02, self.weight[part], self.residual[part])
            self.grad_fp32[part] = values * 1e-3
            self.grad[part] = self.grad_fp32[part]
            self.exp_avg[part] = values.flip(0) * 1e-4
            self.exp_avg_sq[part] = self.exp_avg[part] ** 2

    def _filled(self, dtype: torch.dtype) -> Tensor:
        memory = mmap.mmap(-1, self.numel * dtype.itemsize)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype)

    def _slices(self, step: int) -> list[slice]:
        return [slice(start, min(start + step, self.numel)) for start in range(0, self.numel, step)]

    def update(
        self, kernels: NativeKernels | TorchKernels, grad_dtype: torch.dtype | None, out: Tiles | None = None
    ) -> None:
        """Update every tile, in place or into the state of `out`."""
        grads = {torch.bfloat16: self.grad, torch.float32: self.grad_fp32, None: None}[grad_dtype]
        for t in self._slices(self.tile_numel):
            grad, to = None if grads is None else grads[t], None if out is None else out.planes(t)
            kernels.update(self.weight[t], self.residual[t], grad, self.exp_avg[t], self.exp_avg_sq[t], HYPER, out=to)

    def planes(self, part: slice) -> Planes:
        return Planes(self.weight[part], self.residual[part], self.exp_avg[part], self.exp_avg_sq[part])

    def stream(self, kernels: NativeKernels) -> None:
        for t in self._slices(self.tile_numel):
            kernels.stream(self.weight[t], self.residual[t], self.grad[t], self.exp_avg[t], self.exp_avg_sq[t])


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Report:
    """Writes the lines: what every line of a call shares, and what is measured."""

    def __init__(self, steps: int, *, run: str, out: str | None) -> None:
        self.steps, self.out = steps, out
        self.shared = shared("optimizer", run, sys.argv)

    def line(
        self, case: str, *, isa: str, threads: int, tiles: Tiles, nbytes: int, times: list[float], stream: list[float]
    ) -> None:
        took = spread(times)
        stream_gbps = 26 * tiles.numel / statistics.median(stream) / 1e9 if stream else None
        measured = {
            "case": case,
            "isa": isa,
            "cpu_threads": threads,
            "shape": str(tiles.numel),
            "tile_numel": tiles.tile_numel,
            "steps": len(times),
            "step_s": took,
            "gparam_per_s": round(tiles.numel / took["median"] / 1e9, 4),
            "gbps": round(nbytes * tiles.numel / took["median"] / 1e9, 2),
            "stream_gbps": None if stream_gbps is None else round(stream_gbps, 2),
            "host_peak_gib": host_peak_gib(),
        }
        write(self.shared | measured, self.out)

    def native(
        self,
        case: str,
        tiles: Tiles,
        threads: int,
        *,
        grad_dtype: torch.dtype | None = torch.bfloat16,
        isa: str | None = None,
        out: Tiles | None = None,
    ) -> None:
        """The update, and between any two of them the stream loop, twice: its second pass undoes the first."""
        kernels = load(threads, isa=isa)
        assert isinstance(kernels, NativeKernels), "no native library: make native"
        with kernels:
            times, stream = [], []
            for step in range(self.steps + 2):
                taken = seconds(lambda: tiles.update(kernels, grad_dtype, out))
                moved = [seconds(lambda: tiles.stream(kernels)) for _ in range(2)]
                if step >= 2:
                    times.append(taken)
                    stream += moved
            nbytes = STATE_NBYTES + GRAD_NBYTES[grad_dtype]
            self.line(case, isa=kernels.isa, threads=threads, tiles=tiles, nbytes=nbytes, times=times, stream=stream)

    def stand_in(self, tiles: Tiles, threads: int) -> None:
        torch.set_num_threads(threads)
        kernels = TorchKernels()
        times = [seconds(lambda: tiles.update(kernels, torch.bfloat16)) for _ in range(3)][1:]
        self.line("torch-stand-in", isa="torch", threads=threads, tiles=tiles, nbytes=26, times=times, stream=[])

    def fused(self, tiles: Tiles, threads: int) -> None:
        """torch.optim.AdamW(fused=True) on fp32 weights and gradients: 28 bytes a parameter, and no bf16 copy."""
        torch.set_num_threads(threads)
        parameters = []
        for start in range(0, tiles.numel, tiles.tile_numel):
            numel = min(tiles.tile_numel, tiles.numel - start)
            parameters.append(torch.nn.Parameter(torch.full((numel,), 0.02)))
            parameters[-1].grad = torch.full((numel,), 1e-3)
        optimizer = torch.optim.AdamW(parameters, lr=HYPER.lr, weight_decay=HYPER.weight_decay, fused=True)
        times = [seconds(optimizer.step) for _ in range(self.steps + 2)][2:]
        self.line("torch-fused-fp32", isa="torch", threads=threads, tiles=tiles, nbytes=28, times=times, stream=[])


def main() -> None:
    cpus = available_cpus()
    counts = sorted({n for n in (1, 2, 4, 8, 12, cpus - 2, cpus) if 1 <= n <= cpus})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters; their state takes 12 bytes each")
    parser.add_argument("--tile", type=int, default=1 << 24, help="parameters of one call")
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=counts)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--run", help="id of the call that this belongs to")
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--only-native", action="store_true", help="the native update with a bf16 gradient and no more")
    options = parser.parse_args()
    report = Report(options.steps, run=options.run or new_run(), out=options.out)
    tiles, most = Tiles(options.numel, options.tile), max(options.threads)
    for threads in options.threads:
        report.native("ours", tiles, threads)
    if options.only_native:
        return
    report.native("ours-out-of-place", tiles, most, out=Tiles(options.numel, options.tile))
    report.native("ours-grad-fp32", tiles, most, grad_dtype=torch.float32)
    report.native("ours-grad-none", tiles, most, grad_dtype=None)
    for isa in load(1).isas:
        report.native(f"ours-{isa}", tiles, most, isa=isa)
    report.stand_in(Tiles(min(options.numel, 1 << 24), options.tile), most)
    report.fused(tiles, most)


if __name__ == "__main__":
    main()
