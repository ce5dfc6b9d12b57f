"""The systems that `step.py` compares: one file a system, each with `measure(settings) -> what it adds to the line`.

A case is called by name in a process of its own. `stock` and the peers share `loop.py`; all get the same weights and
tokens from `shapes.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

MODULES = {
    "stock-resident": "stock",
    "stock-resident-bf16": "stock",
    "stock-fwd-bwd": "stock",
    "ours-streamed": "ours",
    "ours-resident": "ours",
    "ours-auto": "ours",
    "fsdp2": "fsdp2",
    "deepspeed-zero2": "zero",
    "deepspeed-zero3": "zero",
    "trainstream": "paged",
    "megatrain": "megatrain",
}
"""Case: the module of this package that measures it."""


PACKAGES = {"deepspeed-zero2": "deepspeed", "deepspeed-zero3": "deepspeed", "trainstream": "trainstream"}
"""What a case needs that is not the project's own."""


class NotHere(Exception):
    """A case that this machine or this version cannot run: a package, a device or an option is missing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One case and what it is measured on.

    case: a key of MODULES. update: eager or deferred, of ours alone. gpu_limit_gib: of this case. max_grad_norm: 0 is
    no clipping. liger: of the stock model and the peers. Of ours: kernels, window, tile_numel, trace, engine (further
    options by name), offload (shares of optimizer, weights and activations that lie in offload_dir, or of the blocks
    whose whole state does) and plan_layers (of a model whose plan is compared with). cpu_threads: None is what each
    system chooses itself. megatrain: folder of a checkout.
    """

    case: str
    shape: str
    batch: int
    seq: int
    num_layers: int | None = None
    micro_batches: int = 1
    steps: int = 6
    warmup: int = 2
    update: str | None = None
    max_grad_norm: float = 0.0
    gpu_limit_gib: float | None = None
    device: str = "auto"
    cpu_threads: int | None = None
    liger: bool = True
    kernels: str = "auto"
    tile_numel: int = 16 << 20
    window: int = 3
    engine: dict[str, object] = field(default_factory=dict)
    offload: dict[str, float] = field(default_factory=dict)
    offload_dir: str | None = None
    plan_layers: int | None = None
    trace: str | None = None
    megatrain: str | None = None


@dataclass(frozen=True, slots=True)
class CaseName:
    """`ours-auto-24:eager`, `fsdp2:clip` or `ours-streamed:deferred=0.1` in parts: the case, the GiB that end its name,
    what follows the colon, and the norm that it clips to (None: the call's)."""

    case: str
    gpu_limit_gib: float | None
    update: str | None
    clips: bool
    max_grad_norm: float | None = None


def parse_case(text: str) -> CaseName:
    """Raises SystemExit for a case that nobody knows."""
    name, _, program = text.partition(":")
    suffix, equals, norm = program.partition("=")
    found = re.fullmatch(r"(ours-\w+?)-(\d+(?:\.\d+)?)", name)
    case, limit = (found[1], float(found[2])) if found else (name, None)
    if case not in MODULES:
        raise SystemExit(f"case is {text!r}, must be one of {', '.join(MODULES)}")
    ours = MODULES[case] == "ours"
    allowed = ("", "eager", "deferred") if ours else ("",) if case == "stock-fwd-bwd" else ("", "clip")
    if suffix not in allowed:
        raise SystemExit(
            f"case is {text!r}: after {name} may follow {' or '.join(f':{a}' for a in allowed if a) or 'nothing'}"
        )
    clips = suffix in ("deferred", "clip")
    if equals and not (clips and _is_norm(norm)):
        raise SystemExit(
            f"case is {text!r}: = is for a norm above 0 that a case clips to, as in ours-streamed:deferred=0.1"
        )
    return CaseName(case, limit, (suffix or "eager") if ours else None, clips, float(norm) if equals else None)


def _is_norm(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def missing(settings: Settings) -> str | None:
    """Why the case cannot be run, as far as that is seen without importing anything; None if it may be."""
    package = PACKAGES.get(settings.case)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed: pip install {package}"
    if settings.case == "megatrain" and not (settings.megatrain and (Path(settings.megatrain) / "infinity").is_dir()):
        return "no checkout of MegaTrain: give its folder with --megatrain"
    return None


def measure(settings: Settings) -> dict[str, object]:
    """What the case adds to its line. Raises NotHere."""
    if reason := missing(settings):
        raise NotHere(reason)
    run: Callable[[Settings], dict[str, object]] = import_module(f"cases.{MODULES[settings.case]}").measure
    return run(settings)
