"""One sentence about what a run's speed hangs on, and what would change it."""

from __future__ import annotations

from collections.abc import Mapping

from slideformer.schedule import three_digits

BINDS = 0.85
"""Share of the step that a lane works for at least when it sets the pace; the rest is where steps join."""

MORE_TOKENS = "more tokens a step (per_device_train_batch_size, gradient_accumulation_steps)"
REMEDIES = {
    "compute": "the device is at work nearly all the time; only a faster device, or fewer tokens, makes a step shorter",
    "update": f"{MORE_TOKENS}, more cpu_threads, or more device memory for units that are updated there hide it",
    "upload": f"{MORE_TOKENS}, or more device memory for units that never move, hide it",
    "download": f"{MORE_TOKENS} hide it",
    "spill": "more device memory keeps saved inputs there; shorter or fewer rows save less",
    "fetch": "more device memory keeps saved inputs there; shorter or fewer rows save less",
    "disk": f"{MORE_TOKENS} hide it; smaller shares on disk (or, where offload_optimizer, offload_weights and "
    "offload_activations are auto, a larger max_host_memory) and a faster disk make it shorter",
    "gather": "fewer different tokens a step, or device memory for the whole table, make it shorter",
}


def verdict(busy: Mapping[str, float], step_s: float, predicted_s: float | None, clipped_s: float | None = None) -> str:
    """busy: share of a step that each lane worked, 0 to 1. predicted_s, clipped_s: of a full step, and of a
    clipped one, by the plan, where it was.
    """
    lane = max(busy, key=lambda name: busy[name])
    others = ", ".join(f"{name} {share:.0%}" for name, share in sorted(busy.items(), key=lambda pair: -pair[1])[1:4])
    beside = f" (then {others})" if others else ""
    clipped = "" if clipped_s is None else f" ({three_digits(clipped_s)} s when clipped)"
    promised = "" if predicted_s is None else f", {three_digits(predicted_s)} s by the plan{clipped}"
    time = f"a step takes {three_digits(step_s)} s{promised}"
    if busy[lane] >= BINDS:
        return f"{lane} binds: {busy[lane]:.0%} of the step{beside}; {time}. {_sentence(REMEDIES[lane])}"
    return (
        f"no lane binds: {lane} is busiest with {busy[lane]:.0%} of the step{beside}; {time}. Lanes wait for each "
        "other: a larger window or ring may help, and so may fewer other programs on this machine."
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
