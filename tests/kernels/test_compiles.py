"""Every Triton kernel compiles for AMD GPUs, down to their machine code, without one being there. Compiled, not run.

And what must not be fused is not: seen in the PTX for an H200.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import slideformer.kernels
from slideformer.kernels import rms_norm

AMD = [GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx1100", 32)]
H200 = GPUTarget("cuda", 90, 32)

# Kernel -> what its arguments are: types of those whose type the name does not tell, and the constants.
KERNELS: dict[str, dict[str, object]] = {
    "softmax_gradient._softmax_gradient": {
        "z_ptr": "*bf16", "label_ptr": "*i64", "num_columns": "i32", "HAS_CAP": True, "BLOCK": 4096,
    },
    "softmax_gradient._softmax_sums": {
        "z_ptr": "*bf16", "label_ptr": "*i64", "num_columns": "i32", "first_column": "i32", "HAS_CAP": True,
        "BLOCK": 4096,
    },
    "softmax_gradient._gradient_of_slice": {
        "z_ptr": "*bf16", "label_ptr": "*i64", "num_columns": "i32", "first_column": "i32", "HAS_CAP": True,
        "BLOCK": 4096,
    },
    "adamw._adamw": {
        "weight_ptr": "*i16", "residual_ptr": "*i16", "grad_ptr": "*i16", "numel": "i32", "decay_numel": "i32",
        "HAS_GRAD": True, "GRAD_IS_BF16": True, "SCALE_ON_DEVICE": True, "BLOCK": 1024,
    },
    "squared_norm._shares": {
        "grad_ptr": "*i16", "share_ptr": "*fp64", "numel": "i32", "IS_BF16": True, "BLOCK": 4096,
    },
    "rms_norm._forward": {
        "x_ptr": "*bf16", "add_ptr": "*bf16", "sum_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16",
        "num_rows": "i32", "num_columns": "i32", "ADD": True, "ROUND_FIRST": True, "ROWS": 1, "HEAD": 2048,
        "TAIL": 1024, "STAGES": 2,
    },
    "rms_norm._backward": {
        "grad_ptr": "*bf16", "sum_grad_ptr": "*bf16", "x_ptr": "*bf16", "weight_ptr": "*bf16", "x_grad_ptr": "*bf16",
        "num_rows": "i32", "num_columns": "i32", "ADD": True, "ROUND_FIRST": True, "WEIGHT_GRAD": True, "ROWS": 1,
        "HEAD": 2048, "TAIL": 1024, "STAGES": 3, "PER_SUM": 2,
    },
    "rms_norm._add_up": {
        "out_ptr": "*bf16", "num_sums": "i32", "num_columns": "i32", "SUMS": 64, "COLUMNS": 32,
    },
    "rotary._rotary": {
        "q_ptr": "*bf16", "k_ptr": "*bf16", "cos_ptr": "*bf16", "sin_ptr": "*bf16",
        **dict.fromkeys(("q_heads", "k_heads", "half"), "i32"),
        **{f"{x}_{y}_stride": "i32" for x in "qk" for y in ("row", "head", "token")},
        "cos_row_stride": "i32", "cos_token_stride": "i32",
        "INTERLEAVED": False, "Q_HEADS": 32, "K_HEADS": 8, "HALF": 64,
    },
    **dict.fromkeys(
        ("glu._forward", "glu._backward"),
        {
            "grad_ptr": "*bf16", "gate_ptr": "*bf16", "up_ptr": "*bf16", "out_ptr": "*bf16", "num_columns": "i32",
            "gate_stride": "i32", "up_stride": "i32", "SILU": False, "BLOCK": 4096,
        },
    ),
    "squared_norm._add_shares": {"share_ptr": "*fp64", "num_shares": "i32", "BLOCK": 1024},
}  # fmt: skip


def kernel_of(name: str) -> JITFunction:
    module, function = name.split(".")
    return getattr(importlib.import_module(f"slideformer.kernels.{module}"), function)


def compiled(name: str, target: GPUTarget, *, enable_fp_fusion: bool = True, given=None, num_warps: int = 8):
    kernel, given = kernel_of(name), given or KERNELS[name]
    signature, constants = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        value = given.get(argument, "*fp32" if argument.endswith("_ptr") else "fp32")
        if argument.isupper():
            signature[argument], constants[(index,)] = "constexpr", given[argument]
        else:
            signature[argument] = value
    options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)


@pytest.mark.parametrize("target", AMD, ids=lambda target: target.arch)
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_for_amd(name: str, target: GPUTarget):
    assert len(compiled(name, target).asm["hsaco"]) > 1000


H200_SHARED, ADA_SHARED, AMD_SHARED = 232448, 101376, 65536
ADA = GPUTarget("cuda", 89, 32)


@pytest.mark.parametrize(
    ("columns", "dtype", "target", "shared", "stages"),
    [
        (3072, "bf16", H200, H200_SHARED, 3),
        (20_000, "bf16", H200, H200_SHARED, 2),
        (20_000, "fp32", H200, H200_SHARED, 1),
        (4096, "fp32", H200, H200_SHARED, 3),
        (3072, "bf16", ADA, ADA_SHARED, 3),
        (4097, "fp32", ADA, ADA_SHARED, 2),
        (128, "fp32", AMD[0], AMD_SHARED, 2),
        (8192, "bf16", AMD[0], AMD_SHARED, 1),
    ],
)
def test_rows_under_way_have_room_in_shared_memory(monkeypatch, columns, dtype, target, shared, stages):
    """Of the norm's backward with the residual, which reads three tensors."""
    monkeypatch.setattr(rms_norm, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(rms_norm, "shared_nbytes", lambda device: shared)
    rms_norm._shape.cache_clear()
    nbytes = 3 * {"bf16": 2, "fp32": 4}[dtype]
    _, sizes = rms_norm._shape(4096, columns, rms_norm.BACKWARD, torch.device("cpu"), nbytes)
    rms_norm._shape.cache_clear()
    num_warps = sizes.pop("num_warps")
    assert sizes["STAGES"] == stages
    given = {key: f"*{dtype}" if value == "*bf16" else value for key, value in KERNELS["rms_norm._backward"].items()}
    done = compiled("rms_norm._backward", target, given=given | sizes, num_warps=num_warps)
    assert done.metadata.shared <= shared


def test_no_kernel_is_left_out():
    """Those with pointers are launched; the others are called by them."""
    found = set()
    for info in pkgutil.iter_modules(slideformer.kernels.__path__):
        module = importlib.import_module(f"slideformer.kernels.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and any(argument.endswith("_ptr") for argument in value.arg_names):
                found.add(f"{info.name}.{name}")
    assert found == set(KERNELS)


def test_the_update_rounds_every_operation_on_its_own():
    """A product without a rounding mode in its name may be fused with a sum by the assembler."""
    ptx = compiled("adamw._adamw", H200, enable_fp_fusion=False).asm["ptx"]
    operations = set(re.findall(r"\b(?:fma|mad|mul|sqrt|div|rsqrt|rcp)\.[\w.]*f(?:32|64)", ptx))
    assert operations == {"mul.rn.f32", "sqrt.rn.f32", "div.rn.f32"}
    assert ".ftz" not in ptx
    assert "fma.rn.f32" in compiled("adamw._adamw", H200, enable_fp_fusion=True).asm["ptx"]
