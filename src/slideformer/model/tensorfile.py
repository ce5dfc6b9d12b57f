"""One safetensors file, read and written in pieces: no tensor is ever whole in memory.

What the tensors are for is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from slideformer.errors import BadInput

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Held(Entry):
    """One that is there as a tensor: of a file that another library has opened (see `pickled`)."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Writing:
    """One tensor to write. read(start, stop): its elements [start, stop), flat, of its dtype, on the CPU."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    read: Callable[[int, int], torch.Tensor]


class Out(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


def write(out: Out, tensors: Sequence[Writing], *, piece_numel: int) -> None:
    """Write a whole file; elements are asked for in order, at most `piece_numel` at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.numel * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned in the file
    out.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        for start in range(0, tensor.numel, piece_numel):
            stop = min(start + piece_numel, tensor.numel)
            values = tensor.read(start, stop).contiguous()
            assert values.shape == (stop - start,), f"{tensor.name}: got {tuple(values.shape)} for {stop - start}"
            assert values.dtype is tensor.dtype, f"{tensor.name}: got {values.dtype} for {tensor.dtype}"
            out.write(memoryview(values.view(torch.uint8).numpy()))


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a file by name. Raises BadInput for a file that is not complete."""
    try:
        with open(path, "rb") as file:
            with safe_open(path, framework="pt"):  # checks lengths, offsets, overlaps and coverage
                pass
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror or error}): copy it again, or make it readable."
        ) from error
    except (SafetensorError, ValueError) as error:
        nbytes = path.stat().st_size
        raise BadInput(
            f"{path} is not a complete safetensors file ({error}; {nbytes} bytes): copy it again."
        ) from error
    header.pop("__metadata__", None)
    entries = {}
    for name, found in header.items():
        start, stop = found["data_offsets"]
        entries[name] = Entry(path, name, found["dtype"], tuple(found["shape"]), 8 + length + start, stop - start)
    return entries


def values(entry: Entry, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a tensor as stored, flat, in memory of their own."""
    if isinstance(entry, Held):
        return entry.tensor.reshape(-1)[start:stop].clone()
    itemsize = DTYPES[entry.dtype].itemsize
    part = replace(entry, start=entry.start + start * itemsize, nbytes=(stop - start) * itemsize)
    return next(pieces(part, stop - start, torch.empty(part.nbytes, dtype=torch.uint8)))


def pieces(entry: Entry, numel: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's values as stored, in flat order, `numel` at a time, as views of `buffer` (bytes)."""
    dtype = DTYPES[entry.dtype]
    if isinstance(entry, Held):
        for piece in entry.tensor.reshape(-1).split(numel):
            yield buffer[: piece.nbytes].view(dtype).copy_(piece)
        return
    step = numel * dtype.itemsize
    with open(entry.file, "rb", buffering=0) as file:
        file.seek(entry.start)
        for start in range(0, entry.nbytes, step):
            nbytes = min(step, entry.nbytes - start)
            view, done = memoryview(buffer.numpy())[:nbytes], 0
            while done < nbytes:
                got = file.readinto(view[done:])
                if not got:
                    raise BadInput(f"{entry.file} ended in the middle of {entry.name}: copy it again.")
                done += got
            yield buffer[:nbytes].view(dtype)
