"""What does a checkpoint cost? Plain files of the same bytes, a save that training waits for, and one behind it.

    python benchmarks/checkpoint.py --shape llama-3.2-1b --batch 8 --seq 1024 --folder /where/checkpoints/go

Steps of a streamed model with random weights, clipped. "stall" is how much longer the steps took that had a save,
"held" for how long updates waited for the copy of their unit; shares are of the time that plain writes and flushes of
the same files take, measured right after. Prints one JSON line, and each round's seconds on stderr; the first round, in
which the memory for copies is taken, is not in the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from lines import new_run, shared, write
from pool import fill_alike
from shapes import random_tokens, shape
from slideformer.config import TrainConfig
from slideformer.data.batches import MicroBatch
from slideformer.device import open_device
from slideformer.engine import Engine, EngineOptions
from slideformer.model.decoder import Decoder
from slideformer.train.checkpoint import Progress
from slideformer.train.retention import numbered
from slideformer.train.saver import Saver


class Silent:
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, line: str) -> None:
        self.told.append(line)

    warn = note


def main() -> None:
    args = parse()
    config = shape(args.shape, num_layers=args.num_layers)
    with open_device(args.device) as device:
        dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
        decoder = Decoder(config, dtype=dtype, tile_numel=16 << 20, device=device.torch_device)
        options = EngineOptions(micro_batch_size=args.batch, max_length=args.seq, resident=())
        with Engine(decoder, device, options) as engine:
            fill_alike(engine)
            line = {
                **shared("checkpoint", new_run(), sys.argv),
                "shape": args.shape,
                "batch": args.batch,
                "seq": args.seq,
            }
            write({**line, **measure(engine, args)}, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--out", help="a file that gets the line too")
    return parser.parse_args()


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, object]:
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = random_tokens(0, args.batch, args.seq, engine.decoder.vocab_size)
    batch = [MicroBatch(tokens, tokens)]

    def steps(count: int) -> float:
        start = time.perf_counter()
        results = [engine.step(batch, lr=1e-5) for _ in range(count)]
        results[-1].wait()
        return time.perf_counter() - start

    steps(2)
    step_s = statistics.median(steps(1) for _ in range(5))
    found: dict[str, list[float]] = {
        "plain_s": [],
        "foreground_s": [],
        "behind_held_s": [],
        "behind_stall_s": [],
        "behind_s": [],
    }
    number, nbytes = 0, 0
    savers = {}
    with ExitStack() as held:
        for behind in (False, True):
            settings = TrainConfig(
                model_name_or_path="m", dataset="d", output_dir=str(folder), save_in_background=behind
            )
            savers[behind] = held.enter_context(Saver(settings, engine, Silent(), {}, {}).running())
        for _ in range(args.saves + 1):  # in the first round memory for the copies is taken
            for behind, saver in savers.items():
                number += 1
                start, held_before = time.perf_counter(), engine.held_s
                saver.save(Progress(step=number, num_updates=number, evaluated=True))
                if not behind:
                    found["foreground_s"].append(time.perf_counter() - start)
                    continue
                begun, count = time.perf_counter() - start, 0
                while not saver.is_done:
                    steps(1)
                    count += 1
                found["behind_s"].append(time.perf_counter() - start)
                found["behind_held_s"].append(begun + engine.held_s - held_before)
                found["behind_stall_s"].append(found["behind_s"][-1] - count * step_s)
            newest = numbered(folder)[0][1]
            nbytes = sum(path.stat().st_size for path in newest.iterdir())
            found["plain_s"].append(plain(newest, folder / "plain"))
            print({name: round(values[-1], 2) for name, values in found.items()}, file=sys.stderr, flush=True)
    for _, path in numbered(folder):
        shutil.rmtree(path)
    medians = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {
        "device": engine.device.kind,
        "nbytes": nbytes,
        "step_s": step_s,
        **medians,
        "foreground_share": medians["foreground_s"] / medians["plain_s"],
        "behind_stall_share": medians["behind_stall_s"] / medians["plain_s"],
        "behind_held_share": medians["behind_held_s"] / medians["plain_s"],
        "each": found,
    }


def plain(source: Path, target: Path) -> float:
    """Seconds to write and flush files of the same sizes, from memory."""
    target.mkdir()
    piece = os.urandom(32 << 20)
    start = time.perf_counter()
    for path in sorted(source.iterdir()):
        left = path.stat().st_size
        with open(target / path.name, "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(piece[:left])
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    main()
