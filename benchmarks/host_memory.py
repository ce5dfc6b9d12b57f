"""Does a run take as much less of the host as its plan says, when shares of its state lie on disk?

    python benchmarks/host_memory.py --shape llama-3.2-1b --num-layers 3 --folder FOLDER --out host-memory.jsonl

First the moments, by --shares of them, then both planes of the weights with all of the moments on disk. Every run is a
process of its own, forked before anything of the model's size or of the device is there: it builds the engine, fills it
and takes --steps steps. One JSON line a run: what the process has grown by, at the end (RssAnon + RssShmem) and at most
(VmHWM), what the plan says, and by how much both fall from the run of the same kind without any share. Shares are kept
to the unit that comes nearest, so the plan's fall is not the share itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lines import GIB, new_run, shared, spread, write
from pool import fill_alike
from shapes import random_tokens, shape
from slideformer.data.batches import MicroBatch
from slideformer.device import Device, open_device
from slideformer.engine import Engine, EngineOptions, Offload
from slideformer.model.decoder import Decoder

LR = 1e-5
SHARES = (0.25, 0.5, 1.0)
KEPT = {"VmHWM": "peak", "RssAnon": "resident", "RssShmem": "resident"}


@dataclass(frozen=True, slots=True)
class Shares:
    """Of both moments, and of both planes of the weights, on disk."""

    optimizer: float
    weights: float

    def __str__(self) -> str:
        return f"optimizer={self.optimizer:g},weights={self.weights:g}"


def main() -> int:
    args = _arguments()
    args.run = args.run or new_run()
    found: dict[Shares, dict[str, object]] = {}
    for shares in _runs(args.shares):
        common, found[shares] = _in_own_process(args, shares)
        write(common | _line(args, shares, found[shares], found[_base_of(shares)]), args.out)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b", help="a name of shapes.py, or a config.json or its folder")
    parser.add_argument("--num-layers", type=int, help="cut the shape")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--tile-numel", type=int, default=16 << 20)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--run", help="id of the call that this belongs to")
    parser.add_argument("--out", help="file that lines are added to")
    args = parser.parse_args()
    if wrong := [f"{share:g}" for share in args.shares if not 0 < share <= 1]:
        parser.error(f"--shares has {', '.join(wrong)}, must be above 0 and at most 1")
    return args


def _runs(shares: list[float]) -> list[Shares]:
    """All of the moments, which the runs with weights on disk fall from, is one of the runs even if nobody asked."""
    moments = [Shares(share, 0.0) for share in (0.0, *shares)]
    if 1.0 not in shares:
        moments.append(Shares(1.0, 0.0))
    return [*moments, *(Shares(1.0, share) for share in shares)]


def _base_of(shares: Shares) -> Shares:
    """The run that it falls from; of itself where it is one."""
    return Shares(1.0, 0.0) if shares.weights else Shares(0.0, 0.0)


def _in_own_process(args: argparse.Namespace, shares: Shares) -> tuple[dict[str, object], dict[str, object]]:
    """What all lines share, and what was found. Forked, so that imports are not done again: nothing of torch may work
    here, not even to ask for the GPU's name."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(args, shares, theirs), name=f"host-memory-{shares}")
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = None
    process.join()
    if found is None:
        raise SystemExit(f"the run with {shares} ended with exit code {process.exitcode}; its message stands above")
    return found


def _measure(args: argparse.Namespace, shares: Shares, to: multiprocessing.connection.Connection) -> None:
    began = time.perf_counter()
    config = shape(args.shape, num_layers=args.num_layers)
    with open_device(args.device) as device, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        cuda = device.kind == "cuda"
        square = torch.zeros(512, 512, device=device.torch_device)
        (square @ square).sum().item()  # the context and the matrix library are not ours to count
        dtype = torch.bfloat16 if cuda else torch.float32
        decoder = Decoder(config, dtype=dtype, tile_numel=args.tile_numel, device=device.torch_device)
        before = _memory()
        with Engine(decoder, device, _options(args, shares, folder)) as engine:
            fill_alike(engine)
            ready_s = time.perf_counter() - began
            times = _steps(engine, args)
            grown = {name: nbytes - before[name] for name, nbytes in _memory().items()}
            to.send((shared("host_memory", args.run, sys.argv), _found(engine, device, grown, times, ready_s)))


def _options(args: argparse.Namespace, shares: Shares, folder: str) -> EngineOptions:
    on_disk = {"offload": Offload(shares.optimizer, shares.weights, 0.0), "offload_dir": f"{folder}/state"}
    return EngineOptions(
        micro_batch_size=args.batch,
        max_length=args.seq,
        update="eager",
        max_grad_norm=0.0,
        saved_on_device=None,
        cpu_threads=args.cpu_threads,
        **(on_disk if shares.optimizer or shares.weights else {}),
    )


def _steps(engine: Engine, args: argparse.Namespace) -> list[float]:
    times = []
    for index in range(args.steps):
        tokens = random_tokens(index, args.batch, args.seq, engine.decoder.vocab_size)
        start = time.perf_counter()
        engine.step([MicroBatch(tokens, tokens)], lr=LR).wait()
        engine.synchronize()
        times.append(time.perf_counter() - start)
    return times


def _memory() -> dict[str, int]:
    """Bytes of this process: the most that it ever had, and what it has without what is mapped from files."""
    found = {"peak": 0, "resident": 0}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in KEPT:
            found[KEPT[key]] += int(value.split()[0]) * 1024
    return found


def _found(
    engine: Engine, device: Device, grown: dict[str, int], times: list[float], ready_s: float
) -> dict[str, object]:
    planned = engine.budget.on_one_tier() if device.kind == "cpu" else engine.budget
    return {
        "planned": planned.host_nbytes,
        "disk": planned.disk_nbytes,
        **grown,
        "step_s": times,
        "ready_s": round(ready_s, 1),
        "params": engine.layout.numel,
        "cpu_threads": engine.kernels.threads,
        "direct": None if engine.folder is None else engine.folder.direct,
        "device_kind": device.kind,
    }


def _line(
    args: argparse.Namespace, shares: Shares, found: dict[str, object], base: dict[str, object]
) -> dict[str, object]:
    fall = {key: base[key] - found[key] for key in ("planned", "resident", "peak")}
    return {
        "case": str(shares),
        "cpu_threads": found["cpu_threads"],
        "shape": Path(args.shape.removesuffix("/config.json")).name,
        "num_layers": args.num_layers,
        "batch": args.batch,
        "seq": args.seq,
        "update": "eager",
        "max_grad_norm": 0.0,
        "steps": args.steps,
        "step_s": spread(found["step_s"]),
        "ready_s": found["ready_s"],
        "device_kind": found["device_kind"],
        "params": found["params"],
        "direct": found["direct"],
        "falls_from": str(_base_of(shares)),
        "planned_gib": _gib(found["planned"]),
        "resident_gib": _gib(found["resident"]),
        "host_peak_gib": _gib(found["peak"]),
        "disk_gib": _gib(found["disk"]),
        "planned_fall_gib": _gib(fall["planned"]),
        "resident_fall_gib": _gib(fall["resident"]),
        "peak_fall_gib": _gib(fall["peak"]),
    }


def _gib(nbytes: float) -> float:
    return round(nbytes / GIB, 3)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    sys.exit(main())
