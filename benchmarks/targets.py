"""The targets of docs/performance.md, worked out from the lines of a call. A target that the call has no lines for is
left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rules import ON_DISK, Line, name_of

SHAPE, SEQ = "llama-3.2-3b", 1024
HOST_NBYTES, DRAM_NBYTES, SPARE_GIB = 12.0, 32.0, 1.0
BOTH_BOUNDS = {("llama-3.1-8b", 16, 1024): 1.15, ("qwen3-8b", 1, 1024): 1.3}
PLANNED_OVER, PLANNED_GIB = 1.05, 1.0
"""Of a tier of which at least so much is planned: Python and libraries take some of the host whatever is planned.
host_before_gib is null where an engine was not the first of its process: then nobody knows what it took there."""
OVER_LANES, OVER_STEP, PAGE_CACHE_MIB = 1.15, 1.10, 1024.0
FALL_SHARE, FALL_GIB = 0.02, 0.25
"""How far the fall of host memory may be from the plan's."""
WATCHED_STEPS = 20
"""A run of so many shows whether anything grows."""
RSS_MIB = 16.0
"""What lists of losses and the interpreter's own memory may come to; 5 MiB were seen in 30 steps (H200, 2026-11-30)."""


@dataclass(frozen=True, slots=True)
class Target:
    """text: what is compared. value: what was measured. bound: at most (or `least`: at least) this."""

    text: str
    value: float
    bound: float
    least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        sign, word = ("at least" if self.least else "at most"), ("met" if self.met else "MISSED")
        return f"{word:6}  {self.text}: {self.value:.3f}, {sign} {self.bound:g}"


def verdicts(lines: Sequence[Line]) -> list[str]:
    """One line a target, of one call."""
    return [str(target) for target in targets(lines)]


def targets(lines: Sequence[Line]) -> Iterator[Target]:
    steps = {name_of(line): line for line in lines if line["bench"] == "step"}
    rates = [line for line in lines if line["bench"] == "optimizer" and line["case"] == "ours"]
    best = max(rates, key=lambda line: line["gparam_per_s"], default=None)
    if best is not None:
        yield Target("native update, share of the stream loop's rate", best["gbps"] / best["stream_gbps"], 0.9, True)
        yield Target("native update, Gparam/s", best["gparam_per_s"], 3.9, True)
    disk = {line["case"]: line for line in lines if line["bench"] == "disk"}
    for kind in ("read", "write", "mix"):
        if f"store-{kind}" in disk:
            yield Target(f"the store's rate over a plain loop's, {kind}", disk[f"store-{kind}"]["ratio"], 0.9, True)
    for name, line in steps.items():
        if ON_DISK in name:
            yield from _on_disk(name, line, steps, {case: one["gbps"] * 1e9 for case, one in disk.items()})
        if "plan_layers" in line:
            yield from _of_plan(name, line)
    yield from _falls([line for line in lines if line["bench"] == "host_memory"])
    first = next(iter(steps.values()), None)
    if first is None:
        return
    yield from _memory(steps)
    for name, line in steps.items():
        if line.get("plan_gib") and line["gpu_peak_gib"]:
            yield from _planned(name, line)
        if line.get("steady") and line["steps"] >= WATCHED_STEPS:
            yield from _steady(name, line)
    for name, line in steps.items():
        if line["predicted_step_s"]:
            off = abs(line["predicted_step_s"] / _s(line) - 1)
            yield Target(f"{name}, predicted step off by", off, 0.10)
    if (first["shape"], first["seq"]) == (SHAPE, SEQ):
        if first["batch"] == 32:
            yield from _large_batch(steps, best)
        if first["batch"] == 4:
            yield from _small_batch(steps, best)
    size = (first["shape"], first["batch"], first["seq"])
    if size in (("llama-3.2-1b", 64, 1024), ("llama-3.2-3b", 8, 4096)):
        yield from _ratio(steps, "ours-streamed:eager", "stock-resident", 1 / 0.95)
    if size in BOTH_BOUNDS:
        yield from _either_bound(steps, best, BOTH_BOUNDS[size])
    yield from _ratio(steps, "ours-auto:eager", "stock-resident", 1.02)
    yield from _ratio(steps, "ours-auto:eager", "stock-resident", 0.88)
    for name in _clipped(steps):
        yield from _ratio(steps, name, "ours-streamed:eager", 1.03)


def _on_disk(name: str, line: Line, steps: dict[str, Line], rates: dict[str, float]) -> Iterator[Target]:
    """A step is as long as the slowest of disk, host and GPU. rates: bytes a second of the plain loop, at which the
    disk's time is that of the step's bytes; both ways at once, as it goes on for a while, where that is known."""
    yield Target(f"{name}, direct I/O", float(line["direct"]), 1.0, True)
    yield Target(f"{name}, MiB by which the page cache grew", line["page_cache_mib"], PAGE_CACHE_MIB)
    if not {"loop-read", "loop-write", "loop-mix"} <= rates.keys():
        return
    read, written = line["disk_bytes"]
    both = min(read, written)
    mix = rates.get("loop-mix-long", rates["loop-mix"])
    disk_s = 2 * both / mix + (read - both) / rates["loop-read"] + (written - both) / rates["loop-write"]
    lanes = {lane: share * _s(line) for lane, share in line["busy"].items() if not lane.startswith("disk")}
    longest = max({**lanes, "disk": disk_s}.items(), key=lambda lane: lane[1])
    text = f"{name} over the longest of its lanes ({longest[0]}, {longest[1]:.3g} s)"
    yield Target(text, _s(line) / longest[1], OVER_LANES)
    if (base := steps.get(name.replace(ON_DISK, ""))) is not None:
        text = f"{name} over the longer of its disk's time and the step without a disk"
        yield Target(text, _s(line) / max(disk_s, _s(base)), OVER_STEP)


def _of_plan(name: str, line: Line) -> Iterator[Target]:
    """The device of a few layers is that of all of them."""
    text = f"{name}, peak of the device over that of the plan with {line['plan_layers']} layers"
    share = line["gpu_peak_gib"] / line["plan_layers_gib"]
    yield Target(text, share, 0.95, True)
    yield Target(text, share, 1.05)


def _falls(lines: Sequence[Line]) -> Iterator[Target]:
    """What is on disk is not on the host, by as much as was planned."""
    for line in lines:
        if line["case"] != line["falls_from"]:
            planned = line["planned_fall_gib"]
            off = max(abs(line[f"{found}_fall_gib"] - planned) for found in ("resident", "peak"))
            text = f"host memory, {line['case']}: what its fall is off the plan's over 2% + 256 MiB"
            yield Target(text, off / (FALL_SHARE * planned + FALL_GIB), 1.0)


def _ratio(steps: dict[str, Line], name: str, base: str, bound: float) -> Iterator[Target]:
    if name in steps and base in steps:
        yield Target(f"{name} over {base}", _s(steps[name]) / _s(steps[base]), bound)


def _faster(steps: dict[str, Line], name: str, peers: dict[str, float]) -> Iterator[Target]:
    for peer, bound in peers.items():
        if name in steps and peer in steps:
            yield Target(f"{peer} over {name}", _s(steps[peer]) / _s(steps[name]), bound, least=True)


def _s(line: Line) -> float:
    return line["step_s"]["median"]


def _large_batch(steps: dict[str, Line], rate: Line | None) -> Iterator[Target]:
    yield from _ratio(steps, "ours-resident:eager", "stock-resident", 1.02)
    yield from _ratio(steps, "ours-streamed:eager", "stock-fwd-bwd", 1.06)
    yield from _ratio(steps, "ours-auto-24:eager", "stock-fwd-bwd", 1.03)
    for name in _clipped(steps):
        if (bound_s := _bound_s(steps[name], steps.get("stock-fwd-bwd"), rate)) is not None:
            yield Target(f"{name} over T_backward + max(T_forward, update)", _s(steps[name]) / bound_s, 1.05)
    yield from _faster(
        steps, "ours-streamed:deferred", {"fsdp2:clip": 1.4, "trainstream:clip": 1.8, "megatrain:clip": 2.4}
    )
    yield from _faster(
        steps,
        "ours-streamed:eager",
        {"fsdp2": 1.75, "trainstream": 2.2, "deepspeed-zero3": 2.0, "megatrain": 3.0},
    )


def _clipped(steps: dict[str, Line]) -> list[str]:
    """Of ours, everything streamed, whatever norm they clip to."""
    return [name for name in steps if name.partition("=")[0] == "ours-streamed:deferred"]


def _bound_s(line: Line, base: Line | None, rate: Line | None) -> float | None:
    """T_backward + max(T_forward, update): of the run itself where its lanes were read, else of the stock model and the
    update alone."""
    if parts := line.get("parts_s"):
        return parts["backward"] + max(parts["forward"], parts["update"] or 0.0)
    if base is None or rate is None:
        return None
    update_s = line["params"] / (rate["gparam_per_s"] * 1e9)
    return _s(base) - base["forward_s"] + max(base["forward_s"], update_s)


def _small_batch(steps: dict[str, Line], rate: Line | None) -> Iterator[Target]:
    line = steps.get("ours-streamed:eager")
    if line is not None and rate is not None:
        bound_s = DRAM_NBYTES * line["params"] / (rate["stream_gbps"] * 1e9)
        yield Target("ours-streamed:eager over 32 B a parameter at the stream loop's rate", _s(line) / bound_s, 1.10)
        if line.get("dram_gbps"):
            share = line["dram_gbps"] / rate["stream_gbps"]
            text = "ours-streamed:eager, bytes a second while the update lane works, share of the stream loop's rate"
            yield Target(text, share, 0.90, least=True)


def _planned(name: str, line: Line) -> Iterator[Target]:
    """Bytes of the plan over measured ones: no fewer, and not many more."""
    plan = line["plan_gib"]
    tiers = {"device": (plan["device"], line["gpu_peak_gib"])}
    if line["host_before_gib"] is not None:
        grown = line["host_peak_gib"] - line["host_before_gib"]
        tiers["host"] = (plan["host_state"] + plan["host_buffers"], grown)
    for tier, (planned, measured) in tiers.items():
        if planned >= PLANNED_GIB:
            text = f"{name}, planned bytes of the {tier} over measured ones"
            yield Target(text, planned / measured, 1.0, least=True)
            yield Target(text, planned / measured, PLANNED_OVER)


def _steady(name: str, line: Line) -> Iterator[Target]:
    """From the third step to the last."""
    grown = {key: most - least for key, (least, most) in line["steady"].items()}
    for key in ("slots", "pinned", "segments", "reserved"):
        if key in grown:
            yield Target(f"{name}, change of {key} in {line['steps']} steps", float(grown[key] != 0), 0.0)
    yield Target(f"{name}, MiB by which resident host memory changes", grown["rss_mib"], RSS_MIB)
    if "device_used" in line["steady"] and line["gpu_limit_gib"]:
        used = line["steady"]["device_used"][1] / 2**30 - line["context_gib"]
        yield Target(f"{name}, GiB of the GPU used above the context over the limit", used / line["gpu_limit_gib"], 1.0)


def _either_bound(steps: dict[str, Line], rate: Line | None, bound: float) -> Iterator[Target]:
    """The GPU's time or the host memory's, whichever is longer."""
    base = steps.get("stock-fwd-bwd")
    for name in ("ours-auto-24:eager", "ours-streamed:eager"):
        if name in steps and base is not None and rate is not None:
            memory_s = DRAM_NBYTES * steps[name]["params"] / (rate["stream_gbps"] * 1e9)
            text = f"{name} over the longer of fwd+bwd and 32 B a parameter at the stream loop's rate"
            yield Target(text, _s(steps[name]) / max(_s(base), memory_s), bound)


def _memory(steps: dict[str, Line]) -> Iterator[Target]:
    line = steps.get("ours-streamed:eager")
    if line is None:
        return
    saved_gib = line.get("saved_gib", 0.0)  # inputs on the host, at exact size
    most = HOST_NBYTES * line["params"] / 2**30 + saved_gib + SPARE_GIB
    grown = None if line["host_before_gib"] is None else line["host_peak_gib"] - line["host_before_gib"]
    if grown is not None and line["options"]["saved_on_device"] in (0, None):  # all there, or none
        yield Target("ours-streamed:eager, host GiB over 12 B a parameter + 1 GiB", grown / most, 1.0)
    if (line["shape"], line["batch"], line["seq"]) == ("qwen3-8b", 1, 1024):
        yield Target("ours-streamed:eager, GiB allocated on the device", line["gpu_peak_gib"], 3.0)
