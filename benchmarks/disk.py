"""How fast is a disk past the system's cache, and how much of that does the store on files reach?

    python benchmarks/disk.py --folder FOLDER [--gib 2] [--block-mib 1] [--seconds 30] --out disk.jsonl

Each of `read`, `write` and `mix` (half read while the other half is written) is measured in rounds, everything once a
round, in an order that turns with every round, for about so many seconds:

- `loop-*`: threads that each move blocks of their own, with O_DIRECT and nothing else: what the disk gives; with
  --sustain, `loop-mix-long` for so many seconds on end, since a disk may be faster for a moment.
- `store-*`: slideformer's files, a lane that reads and a lane that writes, extents of --extent-mib, headers and sums;
  `unsummed-*`: the same without sums, so that their cost is seen.
- `gds-*`, with --cuda: the same from and to GPU memory through kvikio, `gds` says whether really or emulated;
  `bounce-*`: through page-locked host memory, one copy after the other.
- `threads-*`, `io_uring-*` (`engines`): the same blocks from C++ (disk_engines.cpp), where there is a compiler.

One JSON line each. `ratio` is the rate over that of `loop` or `threads`, whichever is faster; `page_cache_mib` what the
system's cache grew by in the first round. Cases that end in `-busy` run beside a thread that keeps Python's interpreter
to itself. All use as much memory in turn. Files are removed. --only: some of loop, store, unsummed, busy and engines.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from lines import GIB, host_peak_gib, new_run, shared, spread, write
from slideformer.memory import DiskFile, DiskFolder
from slideformer.memory.disk_direct import open_file

MIB = 2**20
ALIGNED = 4096
STORES = ("store", "unsummed", "gds", "bounce")
KINDS = ("write", "read", "mix")
PARTS = ("loop", "store", "unsummed", "busy", "engines")
LONG = "loop-mix-long"
ENGINES = Path(__file__).with_name("disk_engines.cpp")


class Share:
    """A thread's part of a file, [start, stop), and its own memory: whole blocks, used in turn, starting on a page."""

    def __init__(self, file: int, start: int, stop: int, block: int, memory_nbytes: int) -> None:
        self.file, self.start, self.stop, self.block = file, start, stop, block
        self.memory = memoryview(mmap.mmap(-1, max(memory_nbytes // block, 1) * block))
        for at in range(0, len(self.memory), ALIGNED):  # some disks compress what repeats
            self.memory[at : at + ALIGNED] = os.urandom(ALIGNED)

    def read(self) -> None:
        for offset, memory in self._blocks():
            if os.preadv(self.file, [memory], offset) != self.block:
                raise OSError(f"a read at {offset} came back short")

    def write(self) -> None:
        for offset, memory in self._blocks():
            memory[:8] = offset.to_bytes(8, "little")
            if os.pwritev(self.file, [memory], offset) != self.block:
                raise OSError(f"a write at {offset} came back short")

    def _blocks(self) -> Iterator[tuple[int, memoryview]]:
        for offset in range(self.start, self.stop, self.block):
            at = (offset - self.start) % len(self.memory)
            yield offset, self.memory[at : at + self.block]


def timed(works: list[Callable[[], None]]) -> float:
    """Run all at once; seconds until the last is done. Raises what the first of them raised."""
    failures: list[Exception] = []

    def one(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(work,), name=f"disk-{i}") for i, work in enumerate(works)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - began


class Loop:
    """An O_DIRECT file, and threads that do nothing but move blocks of it."""

    def __init__(self, path: Path, nbytes: int, block: int, threads: int, memory_nbytes: int) -> None:
        """memory_nbytes: of all threads, as much as the store's lanes have: what stays in a cache moves faster."""
        try:
            self.file, self.direct = open_file(path, direct=True), True
        except OSError:  # some network file systems
            path.unlink(missing_ok=True)
            self.file, self.direct = open_file(path, direct=False), False
        each = memory_nbytes // threads
        self.shares = [Share(self.file, a, b, block, each) for a, b in cuts(nbytes // block, threads, block)]
        timed([share.write for share in self.shares])  # what is read must have been written

    def run(self, kind: str) -> float:
        half = len(self.shares) // 2
        works = {
            "read": [share.read for share in self.shares],
            "write": [share.write for share in self.shares],
            "mix": [*(s.read for s in self.shares[:half]), *(s.write for s in self.shares[half:])],
        }
        return timed(works[kind])

    def sustain(self, seconds: float) -> tuple[float, int]:
        """(seconds, passes) of `mix`, again and again for at least so long."""
        took, passes = 0.0, 0
        while took < seconds:
            took, passes = took + self.run("mix"), passes + 1
        return took, passes


def cuts(blocks: int, threads: int, block: int) -> list[tuple[int, int]]:
    """Even shares of the file, as far as blocks can be."""
    ends = [blocks * i // threads * block for i in range(threads + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


class Store:
    """A file of the store, and a lane each that reads and writes it, from and to two buffers in turn."""

    def __init__(self, folder: DiskFolder, nbytes: int, extent: int, device: str = "cpu") -> None:
        self.num = nbytes // extent
        self.file: DiskFile = folder.file("blocks", [extent] * self.num)
        self._to, self._from = ([_buffer(extent).to(device) for _ in range(2)] for _ in range(2))
        self._lane(self.write, range(self.num), self._from)()

    def read(self, extent: int, buffer: torch.Tensor) -> None:
        self.file.read(extent, buffer)

    def write(self, extent: int, buffer: torch.Tensor) -> None:
        self.file.write(extent, buffer)

    def run(self, kind: str) -> float:
        half = self.num // 2
        reads = {"read": range(self.num), "write": range(0), "mix": range(half)}[kind]
        writes = {"read": range(0), "write": range(self.num), "mix": range(half, self.num)}[kind]
        lanes = ((self.read, reads, self._to), (self.write, writes, self._from))
        return timed([self._lane(*lane) for lane in lanes if len(lane[1])])

    def _lane(
        self, call: Callable[[int, torch.Tensor], None], extents: range, buffers: list[torch.Tensor]
    ) -> Callable[[], None]:
        def run() -> None:
            for turn, extent in enumerate(extents):
                call(extent, buffers[turn % 2])

        return run


class Bounce(Store):
    """Buffers on the GPU, and page-locked memory between them and the file."""

    def __init__(self, folder: DiskFolder, nbytes: int, extent: int) -> None:
        self._in, self._out = (torch.empty(extent, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        super().__init__(folder, nbytes, extent, "cuda")

    def read(self, extent: int, buffer: torch.Tensor) -> None:
        self.file.read(extent, self._in)
        buffer.copy_(self._in)

    def write(self, extent: int, buffer: torch.Tensor) -> None:
        self._out.copy_(buffer)
        self.file.write(extent, self._out)


def _buffer(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).random_(0, 255)


def engines(program: Path, file: Path, *sizes: int) -> dict[str, float]:
    """Seconds of each case of the C++ program, once. sizes: as it wants them."""
    words = [str(program), str(file), *map(str, sizes), "1"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return {f"{engine}-{kind}": float(took) for engine, kind, took in map(str.split, done.stdout.splitlines())}


def compiled(folder: Path) -> Path | None:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        print("no C++ compiler: nothing is said about threads of C++ and io_uring", file=sys.stderr)
        return None
    program = folder / "disk_engines"
    subprocess.run([compiler, "-O2", "-std=c++17", "-pthread", str(ENGINES), "-o", str(program)], check=True)
    return program


@contextmanager
def busy() -> Iterator[None]:
    """A thread that computes in Python all the time, as a program's launches do."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, name="busy")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def page_cache_nbytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


Sizes = dict[str, int]
Facts = dict[str, object]


def measure(args: argparse.Namespace, inside: Path) -> tuple[dict[str, list[float]], dict[str, float], Sizes, Facts]:
    """(seconds by case, growth of the page cache in MiB by case, bytes moved by stores and by the others, whether
    stores pass the cache, and how gds works)"""
    nbytes, extent, block = (int(size) for size in (args.gib * GIB, args.extent_mib * MIB, args.block_mib * MIB))
    if nbytes < 2 * max(extent, block * args.threads):
        raise SystemExit(f"{args.gib} GiB are not two extents, or two blocks a thread: raise --gib or lower the others")
    moved = {"store": nbytes // (2 * extent) * 2 * extent, "loop": nbytes // (2 * block) * 2 * block}
    sizes = (moved["loop"], block, args.threads, 4 * extent)  # two buffers for each lane of the store
    program = compiled(inside) if "engines" in args.only else None
    took: dict[str, list[float]] = {}
    grown: dict[str, float] = {}
    ends = time.perf_counter() + args.seconds
    loop = Loop(inside / "blocks", *sizes)
    with ExitStack() as opened:

        def folder(name: str, *, sums: bool = True, gds: bool = False) -> DiskFolder:
            made = DiskFolder(inside / name, threads=args.threads, block_nbytes=block, sums=sums, gds=gds)
            return opened.enter_context(made)

        folders = {name: folder(name, sums=name == "store") for name in ("store", "unsummed") if name in args.only}
        stores = {name: Store(one, moved["store"], extent) for name, one in folders.items()}
        if args.cuda:
            folders |= {"gds": folder("gds", gds=True), "bounce": folder("bounce")}
            stores["gds"] = Store(folders["gds"], moved["store"], extent, "cuda")
            stores["bounce"] = Bounce(folders["bounce"], moved["store"], extent)
        last, order = 0.0, [*({"loop": loop} if "loop" in args.only else {}).items(), *stores.items()]
        while not took or time.perf_counter() + last < ends:
            began = time.perf_counter()
            for kind in KINDS:
                for name, one in order:
                    before = page_cache_nbytes()
                    took.setdefault(f"{name}-{kind}", []).append(one.run(kind))
                    grown.setdefault(f"{name}-{kind}", round((page_cache_nbytes() - before) / MIB, 1))
            order.reverse()
            if "busy" in args.only:
                with busy():
                    for name, one in (("loop", loop), ("store", stores["store"])):
                        took.setdefault(f"{name}-mix-busy", []).append(one.run("mix"))
            if program is not None:
                for case, seconds in engines(program, inside / "blocks", *sizes).items():
                    took.setdefault(case, []).append(seconds)
            last = time.perf_counter() - began
        if args.sustain:
            seconds, passes = loop.sustain(args.sustain)
            took[LONG], moved[LONG] = [seconds], passes * moved["loop"]
        facts = {"direct": all(one.direct for one in folders.values()), "gds": None}
        if args.cuda:
            facts["gds"] = "real" if folders["gds"].gds.real else "emulated"
    os.close(loop.file)
    return took, grown, moved, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--gib", type=float, default=2.0, help="size of each of three files; of five with --cuda")
    parser.add_argument("--block-mib", type=float, default=1.0)
    parser.add_argument("--extent-mib", type=float, default=64.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="at least one round is done")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--sustain", type=float, help="seconds of the loop's mix on end")
    parser.add_argument("--cuda", action="store_true", help="also from and to a GPU's memory; needs kvikio")
    parser.add_argument("--run", help="id of the call that this belongs to")
    parser.add_argument("--out", help="file that lines are added to")
    args = parser.parse_args()
    if "busy" in args.only and "store" not in args.only or not {"loop", "store"} & set(args.only):
        parser.error("--only: without loop and store there is nothing to compare with, and busy needs store")
    common = shared("disk", args.run or new_run(), sys.argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as inside:
        took, grown, moved, facts = measure(args, Path(inside))
    nbytes = {case: moved.get(case, moved["store" if case.startswith(STORES) else "loop"]) for case in took}
    rates = {case: nbytes[case] / statistics.median(times) for case, times in took.items()}
    for case, times in took.items():
        name, kind = case.removesuffix("-long").split("-", 1)
        plain = [rates[each] for each in (f"loop-{kind}", f"threads-{kind}") if each in rates]
        line = {
            "case": case,
            "cpu_threads": args.threads,
            "direct": facts["direct"],
            "gds": facts["gds"] if name == "gds" else None,
            "block_mib": args.block_mib,
            "extent_mib": args.extent_mib if name in STORES else None,
            "nbytes": nbytes[case],
            "steps": len(times),
            "step_s": spread(times),
            "gbps": round(rates[case] / 1e9, 3),
            "ratio": round(rates[case] / max(plain), 3) if plain else None,
            "page_cache_mib": grown.get(case),
            "host_peak_gib": host_peak_gib(),
        }
        write(common | line, args.out)


if __name__ == "__main__":
    main()
