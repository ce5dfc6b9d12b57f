"""How fast is a disk, past the system's cache: reading, writing, and both at once?

    python benchmarks/disk.py [--dir FOLDER] [--blocks 1,4,16] [--gib 4] [--threads 2] --out disk.jsonl

One JSON line for each block size and for `read`, `write`, `mixed-read` and `mixed-write`. The file is opened with
O_DIRECT and each thread works on a share of it, block after block; it is removed at the end. Where a file system has no
O_DIRECT the line says `direct: false`, and its rate is that of the cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lines import GIB, host_peak_gib, new_run, shared, spread, write

MIB = 2**20
ALIGNED = 4096


def open_direct(path: Path) -> tuple[int, bool]:
    """(file, whether its reads and writes pass the cache)."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:  # tmpfs and some network file systems
        return os.open(path, flags, 0o600), False


class Share:
    """A thread's part of the file, [start, stop), and its own block of memory, aligned to a page."""

    def __init__(self, file: int, start: int, stop: int, block: int) -> None:
        self.file, self.start, self.stop, self.block = file, start, stop, block
        self.memory = mmap.mmap(-1, block)
        self.memory[:] = os.urandom(ALIGNED) * (block // ALIGNED)  # some disks compress what repeats within a block

    def read(self) -> None:
        for offset in range(self.start, self.stop, self.block):
            if os.preadv(self.file, [self.memory], offset) != self.block:
                raise OSError(f"a read at {offset} came back short")

    def write(self) -> None:
        for offset in range(self.start, self.stop, self.block):
            self.memory[:8] = offset.to_bytes(8, "little")
            if os.pwritev(self.file, [self.memory], offset) != self.block:
                raise OSError(f"a write at {offset} came back short")

    def close(self) -> None:
        self.memory.close()


def timed(works: list[Callable[[], None]]) -> list[float]:
    """Run all at once; seconds of each. Raises what the first of them raised."""
    took, failures = [0.0] * len(works), []

    def one(index: int) -> None:
        began = time.perf_counter()
        try:
            works[index]()
        except OSError as error:
            failures.append(error)
        took[index] = time.perf_counter() - began

    threads = [threading.Thread(target=one, args=(i,), name=f"disk-{i}") for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return took


def measure(file: int, nbytes: int, block: int, threads: int, repeats: int) -> dict[str, tuple[int, list[float]]]:
    """Case: (bytes moved a repeat, seconds). In the mixed cases one half is read while the other is written."""
    each = nbytes // (2 * threads) // block * block
    if each == 0:
        raise SystemExit(f"{nbytes} bytes are not {2 * threads} blocks of {block}: raise --gib or lower --blocks")
    shares = [Share(file, i * each, (i + 1) * each, block) for i in range(2 * threads)]
    writers, readers = shares[:threads], shares[threads:]
    cases: dict[str, tuple[int, list[float]]] = {
        name: (threads * each, []) for name in ("write", "read", "mixed-read", "mixed-write")
    }
    timed([share.write for share in readers])  # what is read must have been written
    for _ in range(repeats):
        cases["write"][1].append(max(timed([share.write for share in writers])))
        cases["read"][1].append(max(timed([share.read for share in readers])))
        mixed = timed([*(share.read for share in readers), *(share.write for share in writers)])
        cases["mixed-read"][1].append(max(mixed[:threads]))
        cases["mixed-write"][1].append(max(mixed[threads:]))
    for share in shares:
        share.close()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=float, default=4.0, help="size of the file")
    parser.add_argument("--blocks", type=lambda text: [float(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=2, help="of each kind")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", help="id of the call that this belongs to")
    parser.add_argument("--out", help="file that lines are added to")
    args = parser.parse_args()
    common = shared("disk", args.run or new_run(), sys.argv)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        file, direct = open_direct(Path(folder) / "blocks")
        try:
            for block_mib in args.blocks:
                cases = measure(file, int(args.gib * GIB), int(block_mib * MIB), args.threads, args.repeats)
                for case, (nbytes, times) in cases.items():
                    took = spread(times)
                    line = {
                        "case": case,
                        "cpu_threads": args.threads,
                        "direct": direct,
                        "block_mib": block_mib,
                        "nbytes": nbytes,
                        "steps": args.repeats,
                        "step_s": took,
                        "gbps": round(nbytes / took["median"] / 1e9, 3),
                        "host_peak_gib": host_peak_gib(),
                    }
                    write(common | line, args.out)
        finally:
            os.close(file)


if __name__ == "__main__":
    main()
