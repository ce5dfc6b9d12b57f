"""The native library through ctypes, which releases the GIL for the length of a call.

csrc/slideformer_native.h says what each function does; this file only turns checked tensors into pointers.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import astuple, fields
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from slideformer.native.kernels import Parts, Planes, bad_row, check_gather, check_planes, check_rows, check_tile
from slideformer.optim import Hyper, Scalars

LIBRARY_NAME = "libslideformer_native.so"
SOURCES = Path(__file__).with_name("csrc")
GRAD_KINDS = {torch.bfloat16: 1, torch.float32: 2}  # enum sf_grad


class _Scalars(Structure):
    _fields_ = [(field.name, c_float) for field in fields(Scalars)]


class _State(Structure):
    _fields_ = [(name, c_void_p) for name in ("weight", "residual", "exp_avg", "exp_avg_sq")]


def open_library(path: Path) -> CDLL:
    """The library at `path`, with the types of its functions declared.

    Raises OSError if it cannot be loaded or was built from other sources than those beside this file.
    """
    library = CDLL(str(path))
    library.sf_source_digest.restype = c_char_p
    if library.sf_source_digest().decode() != source_digest():
        raise OSError(f"{path} was built from other sources than {SOURCES}")
    pool, rows, scalars, state = c_void_p, c_void_p, POINTER(_Scalars), POINTER(_State)
    signatures = {
        "sf_isas": (c_char_p, []),
        "sf_pool_create": (c_void_p, [c_int32, c_char_p]),
        "sf_pool_destroy": (None, [pool]),
        "sf_adamw": (None, [pool, scalars, state, state, c_int32, c_int32, c_void_p, c_int64]),
        "sf_adamw_rows": (
            c_int64,
            [pool, scalars, state, state, c_int32, c_int32, c_void_p, c_void_p, rows, rows, *[c_int64] * 5],
        ),
        "sf_gather_rows": (c_int64, [pool, c_void_p, rows, c_void_p, c_int64, c_int64, c_int64]),
        "sf_split": (None, [pool, c_void_p, c_void_p, c_void_p, c_int64]),
        "sf_join": (None, [pool, c_void_p, c_void_p, c_void_p, c_int64]),
        "sf_stream": (None, [pool, state, c_void_p, c_int64]),
        "sf_disk_create": (c_void_p, [c_int32, c_int64, c_int32]),
        "sf_disk_stop": (None, [c_void_p]),
        "sf_disk_destroy": (None, [c_void_p]),
        "sf_disk_move": (
            c_int32,
            [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_void_p],
        ),
        "sf_checksum": (c_uint64, [c_void_p, c_int64, c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def source_digest() -> str:
    """SHA-256 over the sources beside this file, as CMakeLists.txt puts it into the library."""
    listed = re.search(r"set\(sources ([^)]*)\)", (SOURCES / "CMakeLists.txt").read_text())
    assert listed, "csrc/CMakeLists.txt names its sources in set(sources ...)"
    digests = [f"{name} {hashlib.sha256((SOURCES / name).read_bytes()).hexdigest()}\n" for name in listed[1].split()]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


class NativeKernels:
    """`HostKernels` in C++, on a pool of `threads` threads of its own (OMP_NUM_THREADS and torch's count do not
    matter). Use as a context manager or close it. In a forked child, calls run on the calling thread alone."""

    def __init__(self, library: CDLL, *, threads: int, isa: str | None = None) -> None:
        """Raises ValueError if `threads` is below 1 or the machine or build lacks `isa` (None: the fastest)."""
        if threads < 1:
            raise ValueError(f"threads is {threads}, must be at least 1")
        self.isas = tuple(library.sf_isas().decode().split(","))  # slowest first
        self.isa = isa or self.isas[-1]
        if self.isa not in self.isas:
            raise ValueError(f"isa is {self.isa!r}, this machine and build have {', '.join(self.isas)}")
        self.threads = threads
        self._library = library
        self._pool: int | None = library.sf_pool_create(threads, self.isa.encode())
        if self._pool is None:
            raise OSError(f"could not start {threads - 1} threads for the native kernels; ask for fewer")
        self._end = weakref.finalize(self, library.sf_pool_destroy, self._pool)

    def update(
        self,
        weight: Tensor,
        residual: Tensor,
        grad: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        hyper: Hyper,
        *,
        out: Planes | None = None,
        parts: Parts = Parts.ALL,
    ) -> None:
        check_tile(weight, residual, grad, exp_avg, exp_avg_sq, out, parts)
        state = _state(weight, residual, exp_avg, exp_avg_sq)
        self._library.sf_adamw(
            self._running(),
            byref(_scalars(hyper)),
            byref(state),
            None if out is None else byref(_state(*out)),
            parts,
            _kind(grad),
            _address(grad),
            weight.numel(),
        )

    def update_rows(
        self,
        weight: Tensor,
        residual: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rows: Tensor,
        grad: Tensor | None,
        grad_rows: Tensor | None,
        hyper: Hyper,
        *,
        more: Tensor | None = None,
        out: Planes | None = None,
        parts: Parts = Parts.ALL,
    ) -> None:
        check_rows(weight, residual, exp_avg, exp_avg_sq, rows, grad, grad_rows, more, out, parts)
        state = _state(weight, residual, exp_avg, exp_avg_sq)
        num_rows, width = weight.shape
        num_grad_rows, num_more_rows = (0 if some is None else some.shape[0] for some in (grad, more))
        bad = self._library.sf_adamw_rows(
            self._running(),
            byref(_scalars(hyper)),
            byref(state),
            None if out is None else byref(_state(*out)),
            parts,
            _kind(grad),
            _address(grad),
            _address(more),
            _address(rows),
            _address(grad_rows),
            rows.numel(),
            num_rows,
            num_grad_rows,
            num_more_rows,
            width,
        )
        if bad >= 0:
            raise bad_row(bad, rows, num_rows, num_grad_rows + num_more_rows, grad_rows)

    def gather_rows(self, src: Tensor, rows: Tensor, out: Tensor) -> None:
        check_gather(src, rows, out)
        row_nbytes = src.shape[1] * src.element_size()
        bad = self._library.sf_gather_rows(
            self._running(), _address(src), _address(rows), _address(out), rows.numel(), src.shape[0], row_nbytes
        )
        if bad >= 0:
            raise bad_row(bad, rows, src.shape[0], 0, None)

    def split(self, master: Tensor, weight: Tensor, residual: Tensor) -> None:
        check_planes(master, weight, residual)
        self._library.sf_split(self._running(), _address(master), _address(weight), _address(residual), master.numel())

    def join(self, weight: Tensor, residual: Tensor, out: Tensor) -> None:
        check_planes(out, weight, residual, master_name="out")
        self._library.sf_join(self._running(), _address(weight), _address(residual), _address(out), out.numel())

    def stream(self, weight: Tensor, residual: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Move the bytes of `update` with a bf16 gradient and compute nothing: the speed limit, for benchmarks.

        Fills the state with meaningless bits.
        """
        check_tile(weight, residual, grad, exp_avg, exp_avg_sq)
        if grad.dtype != torch.bfloat16:
            raise ValueError(f"grad is {grad.dtype}, must be {torch.bfloat16}")
        state = _state(weight, residual, exp_avg, exp_avg_sq)
        self._library.sf_stream(self._running(), byref(state), _address(grad), weight.numel())

    def close(self) -> None:
        self._pool = None
        self._end()

    def __enter__(self) -> NativeKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> int:
        if self._pool is None:
            raise RuntimeError("these kernels are closed; load new ones")
        return self._pool


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _kind(grad: Tensor | None) -> int:
    return 0 if grad is None else GRAD_KINDS[grad.dtype]


@lru_cache(maxsize=64)  # a step calls with a few of them, thousands of times
def _scalars(hyper: Hyper) -> _Scalars:
    return _Scalars(*astuple(hyper.scalars()))


def _state(weight: Tensor, residual: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> _State:
    return _State(*(plane.data_ptr() for plane in (weight, residual, exp_avg, exp_avg_sq)))
