"""How fast is the link between host and device: each way alone, and both at once?

    python benchmarks/link.py [--pieces 1,4,16,64] [--gib 1] [--repeats 10] --out link.jsonl

One JSON line for each direction, piece size and kind of memory: `h2d`, `d2h`, and `both-h2d`, `both-d2h`, the rate of
each way while the other runs. Page-locked memory is registered in place, as the engine's is. Without a GPU the same
copies go from host to host, which says nothing of a link but shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch

from lines import GIB, host_peak_gib, new_run, shared, spread, write

MIB = 2**20


@dataclass(slots=True)
class Ways:
    """Memory for both ways, [nbytes] each, and a stream for each way where there is a GPU."""

    host_up: torch.Tensor
    host_down: torch.Tensor
    device_up: torch.Tensor
    device_down: torch.Tensor
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None

    def pairs(self, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(target, source) of `h2d` or `d2h`."""
        return (self.device_up, self.host_up) if way == "h2d" else (self.host_down, self.device_down)


def make(nbytes: int, device: torch.device, *, pinned: bool) -> Ways:
    up, down = (torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(2))
    if device.type == "cuda" and pinned:
        for memory in (up, down):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(status) != 0:
                raise SystemExit(f"page-locking {memory.nbytes / GIB:.2f} GiB was refused: {status}")
    streams = (torch.cuda.Stream(), torch.cuda.Stream()) if device.type == "cuda" else None
    return Ways(up, down, up.to(device, copy=True), down.to(device, copy=True), streams)


def free(ways: Ways) -> None:
    """Undo the page-locking."""
    for memory in (ways.host_up, ways.host_down):
        if memory.is_pinned():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def seconds(ways: Ways, names: tuple[str, ...], piece: int) -> dict[str, float]:
    """Time of copying everything once each way of `names`, all at once, in pieces queued in turn."""
    began = time.perf_counter()
    if ways.streams is None:
        for name in names:
            target, source = ways.pairs(name)
            for start in range(0, source.numel(), piece):
                target[start : start + piece].copy_(source[start : start + piece])
        return dict.fromkeys(names, time.perf_counter() - began)
    torch.cuda.synchronize()
    events = {name: tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for name in names}
    lanes = dict(zip(names, ways.streams, strict=False))
    for name, stream in lanes.items():
        events[name][0].record(stream)
    for start in range(0, ways.host_up.numel(), piece):
        for name, stream in lanes.items():
            target, source = ways.pairs(name)
            with torch.cuda.stream(stream):
                target[start : start + piece].copy_(source[start : start + piece], non_blocking=True)
    for name, stream in lanes.items():
        events[name][1].record(stream)
    torch.cuda.synchronize()
    return {name: first.elapsed_time(last) / 1e3 for name, (first, last) in events.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="copied each way")
    parser.add_argument("--pieces", type=lambda text: [float(n) for n in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--run", help="id of the call that this belongs to")
    parser.add_argument("--out", help="file that lines are added to")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common, nbytes = shared("link", args.run or new_run(), sys.argv), int(args.gib * GIB)
    for pinned in (True, False):
        ways = make(nbytes, device, pinned=pinned)
        for piece_mib in args.pieces if pinned else args.pieces[-1:]:
            for names in (("h2d",), ("d2h",), ("h2d", "d2h")):
                runs = [seconds(ways, names, int(piece_mib * MIB)) for _ in range(args.repeats + 1)][1:]
                for name in names:
                    took = spread([run[name] for run in runs])
                    line = {
                        "case": name if len(names) == 1 else f"both-{name}",
                        "cpu_threads": 1,
                        "pinned": pinned and device.type == "cuda",
                        "piece_mib": piece_mib,
                        "nbytes": nbytes,
                        "steps": args.repeats,
                        "step_s": took,
                        "gbps": round(nbytes / took["median"] / 1e9, 2),
                        "host_peak_gib": host_peak_gib(),
                    }
                    write(common | line, args.out)
        free(ways)


if __name__ == "__main__":
    main()
