"""What lines of results must satisfy to be believed. Each rule yields one sentence per violation.

`line_faults` looks at one line, `call_faults` at all lines of one `run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cases import MODULES
from flops import model_flops
from shapes import NAMES, shape

Line = dict

BASE_KEYS = "bench run commit date command gpu torch case cpu_threads shape batch seq update max_grad_norm".split()
KEYS = {
    "step": [*BASE_KEYS, *"gpu_limit_gib steps step_s tokens_per_second tflops gpu_peak_gib host_peak_gib".split()]
    + "pinned_gib predicted_step_s busy loss bytes plan_bytes params_updated params".split(),
    "optimizer": [*BASE_KEYS, *"gpu_limit_gib steps step_s gparam_per_s gbps stream_gbps host_peak_gib".split()],
    "link": [*BASE_KEYS, *"gpu_limit_gib steps step_s gbps piece_mib pinned".split()],
    "kernels": "bench run commit date command gpu torch case cpu_threads shape batch seq op impl ms peak_mib".split(),
    "sweep": [*BASE_KEYS, *"gpu_limit_gib steps step_s predicted_step_s plan_gib gpu_peak_gib placed options".split()],
    "product": [*BASE_KEYS, *"gpu_limit_gib steps step_s tokens_per_second engine_tokens_per_second".split()],
    "disk": [*BASE_KEYS, *"gpu_limit_gib steps step_s gbps block_mib".split()],
    "host_memory": [*BASE_KEYS, *"steps step_s falls_from planned_gib resident_gib host_peak_gib disk_gib".split()]
    + "planned_fall_gib resident_fall_gib peak_fall_gib".split(),
    "reach": [*BASE_KEYS, *"gpu_limit_gib over largest refused why_not params tries num_layers".split()],
    "generate": [*BASE_KEYS, *"gpu_limit_gib steps step_s tokens_per_second ratio streamed_ratio link_gbps".split()]
    + "gpu_peak_gib host_peak_gib pinned_gib busy params params_streamed new_tokens".split(),
}
"""Keys that every line of a benchmark has, null where they do not apply."""

STREAMED_UP, STREAMED_DOWN = 3.0, 2.0
"""Bytes a parameter that cross the link in a step, at least: a bf16 weight for each pass (of most blocks: what the
window still holds is not sent again; a tied matrix goes once), and its gradient. The table of an untied model takes
part in neither: only rows of it move, and only those have a gradient."""

BYTES_SHARE, BYTES_PER_TOKEN = 1e-3, 64
"""How far measured bytes may be from the plan's: words of a few bytes, and the batch itself (ids, labels, rows)."""

LOSS_BOUND, LOSS_TOKENS, LOSS_FACTOR = 1e-3, 32 * 1024, 4.0
"""Between ours and the ceiling on one step of so many tokens; of fewer, by the root of their number more, as the mean
of independent errors, up to a factor. Two resident runs differ by up to 3e-4 over 8 steps, since attention's backward
adds in any order; ours and the ceiling by up to 8.1e-4 at 32 x 1024 tokens and 2.0e-3 at 4 x 1024 (Llama-3.2-3B
shape, H200, 2026-11-30)."""

SLOWER_BOUND = 1.05

REFERENCE = {
    ("llama-3.2-3b", 32, 1024): {
        "stock-resident": 1.379 / 1.36,
        "stock-resident-bf16": 1.379 / 1.36,
        "fsdp2": 2.514 / 1.36,
        "deepspeed-zero2": 3.05 / 1.36,
        "deepspeed-zero3": 3.31 / 1.36,
        "megatrain:clip": 4.42 / 1.36,
        "trainstream": 3.15 / 1.36,
        "trainstream:clip": 3.33 / 1.36,
    },
    ("llama-3.2-3b", 4, 1024): {
        "stock-resident-bf16": 0.218 / 0.21,
        "megatrain": 1.90 / 0.21,
        "trainstream": 2.88 / 0.21,
    },
}
"""Step time over that of the stock model's forward and backward, when it was first measured (H200, 2026-11-30). A call
in which one of them is more than 5% slower than this met a machine, or an installation, that is not at its best."""


USUAL_NORM = 1.0


ON_DISK = "+disk"


def name_of(line: Line) -> str:
    """The case as it is called: with its limit if it has one, whether any of it is on disk, its program, whether it
    clips and to what norm, and kernels that are not the usual ones."""
    suffix = line["update"] or ("clip" if line["max_grad_norm"] else "")
    suffix += f"={line['max_grad_norm']:g}" if line["max_grad_norm"] not in (0, USUAL_NORM) else ""
    limit = f"-{line['gpu_limit_gib']:g}" if line["case"] == "ours-auto" and line["gpu_limit_gib"] else ""
    kernels = f"/{line['variant']}" if line.get("variant") else ""
    disk = ON_DISK if "direct" in line else ""
    return f"{line['case']}{limit}{disk}{':' * bool(suffix)}{suffix}{kernels}"


def line_faults(line: Line) -> Iterator[str]:
    bench = line.get("bench")
    if bench not in KEYS:
        yield f"bench is {bench!r}, must be one of {', '.join(KEYS)}"
        return
    if missing := [key for key in KEYS[bench] if key not in line]:
        yield f"has no {', '.join(missing)}"
        return
    if bench == "reach":
        yield from _reached(line)
        return
    times = line["ms" if bench == "kernels" else "step_s"]
    if not 0 < times["min"] <= times["median"] <= times["max"]:
        yield f"its times are not in order: {times}"
    elif bench == "step":
        yield from _rates(line)
        yield from _work(line)


def _reached(line: Line) -> Iterator[str]:
    found, refused = line["largest"], line["refused"]
    if line["over"] not in ("batch", "num_layers"):
        yield f"over is {line['over']!r}, must be batch or num_layers"
    elif found and line[line["over"]] != found:
        yield f"{line['over']} is {line[line['over']]}, the largest is {found}"
    if refused is not None and not found < refused <= found + max(found // 64, 1):
        yield f"the largest that fits is {found}, and the next that was tried {refused}"


def _rates(line: Line) -> Iterator[str]:
    median, tokens = line["step_s"]["median"], line["batch"] * line["seq"]
    if not math.isclose(line["tokens_per_second"], tokens / median, rel_tol=0.01):
        yield f"{line['tokens_per_second']} tokens/s are not {tokens} tokens in {median} s"
    if line["shape"] in NAMES:
        config = shape(line["shape"], num_layers=line.get("num_layers"))
        tflops = model_flops(config, line["batch"], line["seq"]) / median / 1e12
        if not math.isclose(line["tflops"], tflops, rel_tol=0.01, abs_tol=1e-4):
            yield f"{line['tflops']} TFLOP/s are not what the shape asks for in {median} s: {tflops:.4g}"
    if wrong := {lane: share for lane, share in line["busy"].items() if not 0 <= share <= 1.05}:
        yield f"lanes are busy for more than the step: {wrong}"
    if not all(math.isfinite(loss) for loss in line["loss"]):
        yield f"a loss is not finite: {line['loss']}"


def _work(line: Line) -> Iterator[str]:
    params, updated = line["params"], line["params_updated"]
    ours = MODULES.get(line["case"]) == "ours"
    if ours and updated is None or updated is not None and updated != params:
        yield f"{updated} parameters were updated in a step, the model has {params}"
    if not ours:
        return
    moved, planned = line["bytes"], line["plan_bytes"]
    if moved is None or planned is None:
        yield "its bytes were not measured"
        return
    for way in ("up", "down"):
        slack = BYTES_SHARE * planned[way] + BYTES_PER_TOKEN * line["batch"] * line["seq"]
        if abs(moved[way] - planned[way]) > slack:
            yield f"{moved[way]} bytes went {way}, the plan has {planned[way]}"
    if line.get("disk_bytes") != line.get("plan_disk_bytes"):  # lines from before there was a disk have neither
        yield f"{line['disk_bytes']} bytes were read from disk and written, the plan has {line['plan_disk_bytes']}"
    if line["case"] == "ours-streamed":
        params -= line.get("untied_table_params", _untied_table(line["shape"]))
        for way, least in (("up", STREAMED_UP), ("down", STREAMED_DOWN)):
            if moved[way] < least * params:
                yield f"{moved[way] / params:.2f} bytes a parameter went {way}; streamed, at least {least:g} do"


def call_faults(lines: Sequence[Line]) -> Iterator[str]:
    """Of the `step` lines of one run. Lines that fail on their own are not given."""
    lines = [line for line in lines if line["bench"] == "step"]
    base = next((line for line in lines if line["case"] == "stock-fwd-bwd"), None)
    compared = [line for line in lines if MODULES[line["case"]] != "ours" and line is not base]
    if compared and base is None:
        yield f"has {name_of(compared[0])} and no stock-fwd-bwd to judge it by"
    for line in compared if base is not None else ():
        if line.get("num_layers") not in (None, _layers(line["shape"])):
            continue
        usual = REFERENCE.get((line["shape"], line["batch"], line["seq"]), {}).get(name_of(line))
        ratio = line["step_s"]["median"] / base["step_s"]["median"]
        if usual is not None and ratio > SLOWER_BOUND * usual:
            yield (
                f"is void: {name_of(line)} took {ratio:.3f} x stock forward and backward, {usual:.3f} is known of it; "
                "measure again"
            )
    for line in lines:
        ceiling = ceiling_of(line, lines)
        if ceiling is not None and MODULES[line["case"]] == "ours":
            share = math.sqrt(LOSS_TOKENS / (line["batch"] * line["seq"]))
            allowed = LOSS_BOUND * min(max(share, 1.0), LOSS_FACTOR)
            if (off := loss_difference(line, ceiling)) > allowed:
                found = f"its losses are up to {off:.2g} from stock-resident's"
                yield f"{name_of(line)}: {found}, allowed are {allowed:.2g}"


def ceiling_of(line: Line, lines: Sequence[Line]) -> Line | None:
    """The stock-resident line that trained as this one did: with its clipping, or, where there is none, with any."""
    found = [other for other in lines if other["case"] == "stock-resident"]
    same = [other for other in found if other["max_grad_norm"] == line["max_grad_norm"]]
    return next(iter([*same, *found]), None)


def loss_difference(line: Line, other: Line) -> float:
    return max((abs(a - b) for a, b in zip(line["loss"], other["loss"], strict=False)), default=math.nan)


def _untied_table(name: str) -> int:
    """Parameters of the input embedding where the output projection is another matrix; of a shape that has a name. For
    lines that do not say it themselves."""
    if name not in NAMES:
        return 0
    config = shape(name)
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


def _layers(name: str) -> int | None:
    return shape(name).num_hidden_layers if name in NAMES else None
