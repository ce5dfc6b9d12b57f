"""What the store does on a disk that errs, in a process of its own: `python bad_days.py SHIM FOLDER`.

Prints, for each kind of threads and each fault, what came of a write and a read of three blocks.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from memory.pages import BLOCK, noise, on_a_page
from slideformer.memory import DiskFile, DiskFolder
from slideformer.native import loader

NBYTES = 3 * BLOCK + 4096 + 7


def tried(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def one(file: DiskFile, fault: Callable[[bytes], None], kind: str) -> dict[str, str]:
    source, target = noise(NBYTES, len(kind)), on_a_page(NBYTES)
    fault(kind.encode())
    told = {"write": tried(lambda: file.write(0, source))}
    if kind in ("eio", "enospc", "lost"):
        fault(b"")
    told["read"] = tried(lambda: file.read(0, target))
    fault(b"")
    told["equal"] = str(torch.equal(source, target))
    file.write(0, source)
    if kind == "eio":
        fault(b"eio")
        told["read of what is there"] = tried(lambda: file.read(0, target))
        fault(b"")
    file.read(0, target)
    told["after"] = str(torch.equal(source, target))
    return told


def main() -> None:
    shim, path = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
    told: dict[str, dict[str, object]] = {}
    shim.fault(b"threads")
    told["threads"] = {"native": tried(lambda: DiskFolder(path).close())}
    shim.fault(b"")
    for threads in ("native", "stand-in"):
        if threads == "stand-in":
            loader._places = lambda: []
        told[threads] = {}
        with DiskFolder(path, threads=2, block_nbytes=BLOCK) as folder:
            file = folder.file("a", [NBYTES])
            for kind in ("short", "odd", "interrupted", "eio", "enospc", "lost"):
                told[threads][kind] = one(file, shim.fault, kind)
    with DiskFolder(path) as folder:
        file = folder.file("a", [NBYTES])
        shim.fault(b"threads")
        told["threads"]["stand-in"] = tried(lambda: file.write(0, noise(NBYTES, 0)))
        shim.fault(b"")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
