"""What a run computes, in values that can be compared: a checkpoint goes on only where they are the same.

Sizes of the machinery (window, tiles, threads, how a step is split into micro-batches) are left out: the maths does
not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

import torch
from pydantic import JsonValue

from slideformer.config import TrainConfig
from slideformer.data import Batches
from slideformer.engine import Decided, Engine
from slideformer.layout import Layout
from slideformer.model.decoder import Decoder
from slideformer.train.record import versions
from slideformer.train.schedule import num_warmup_steps

MODEL = "config.json: "
NOT_OF_THE_MODEL = frozenset(("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"))
ROWS_A_STEP = "per_device_train_batch_size x gradient_accumulation_steps"
ROWS_AT_ONCE, ROWS_OF_EVALUATION = "per_device_train_batch_size", "per_device_eval_batch_size"
AT_A_TIME = re.compile(r"\d+, ([1-9]\d*) at a time")  # of either, where `auto_find_batch_size` found fewer
HEAD, WHOLE = "output projection", "whole"
NOT_OF_A_MACHINE = frozenset(("auto", "triton", "liger"))  # what was asked for: records of earlier versions have that
SHOWN = 3


def maths(config: TrainConfig, batches: Batches, decoder: Decoder, num_steps: int) -> dict[str, JsonValue]:
    """Name -> value of all that the weights of a run follow from, the weights it starts with aside."""
    found = model(decoder)
    found["trained parameters (freeze)"] = _trained(decoder.layout)
    found["precision (bf16)"] = str(decoder.dtype).removeprefix("torch.")
    found |= batches.identity()
    found[ROWS_A_STEP] = batches.rows_per_step
    for name in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"):
        found[name] = getattr(config, name)
    constant = config.lr_scheduler_type.startswith("constant")
    found["lr_scheduler_type"] = "constant" if constant else config.lr_scheduler_type
    found["steps of warm-up"] = num_warmup_steps(config, num_steps)
    if config.lr_scheduler_kwargs:
        found["lr_scheduler_kwargs"] = dict(config.lr_scheduler_kwargs)
    if not constant:  # else a run may be made longer
        found["steps of the run (max_steps, num_train_epochs)"] = num_steps
        found["min_lr_ratio"] = config.min_lr_ratio
    return found


def bits(config: TrainConfig, decoder: Decoder, device_kind: str) -> dict[str, JsonValue]:
    """Name -> value of what may change the last bits of a sum and nothing else; as it is, not as it was asked for."""
    attention = decoder.module_config._attn_implementation if config.packing else decoder.attn_implementation
    return {
        "device": device_kind,
        **({"threads of torch": torch.get_num_threads()} if device_kind == "cpu" else {}),  # products are cut to them
        ROWS_AT_ONCE: config.per_device_train_batch_size,
        **({} if config.eval_strategy == "no" else {ROWS_OF_EVALUATION: config.eval_batch_size}),
        "attn_implementation": attention,
        "full_determinism": config.full_determinism,
        "kernels": ", ".join(f"{op} of {where}" for op, where in sorted(decoder.kernels.items())) or "torch",
        **{name: versions()[name] for name in ("torch", "transformers")},
    }


def bits_on(engine: Engine, bits: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`bits`, with what the engine decided by its room and its measurements, and the GPU that launches are cut to."""
    found, rows = dict(bits), engine.decided.micro_batch_size
    for name in (ROWS_AT_ONCE, ROWS_OF_EVALUATION):
        given = found.get(name)
        if engine.options.find_micro_batch and isinstance(given, int) and rows < given:
            found[name] = f"{given}, {rows} at a time"
    found[HEAD] = _in_slices(engine.layout.tile_numel) if engine.decided.sliced_head else WHOLE
    if engine.device.model:
        found["GPU"] = engine.device.model
    return found


def decided(then: Mapping[str, JsonValue], now: Mapping[str, JsonValue], tile_numel: int) -> Decided | None:
    """What the engine of a record decided, as far as it gives the same bits here: for the engine of this run.

    then: `bits_on` of any version, as recorded. now: `bits` of this run. None: on another kind of device.
    """
    if then.get("device") != now["device"]:
        return None
    sliced = {WHOLE: False, _in_slices(tile_numel): True}.get(str(then.get(HEAD)))
    names = [name for name in (ROWS_AT_ONCE, ROWS_OF_EVALUATION) if name in now]
    parts = [found for name in names if (found := AT_A_TIME.fullmatch(str(then.get(name))))]
    rows = None
    if _rows(then) == now[ROWS_AT_ONCE] and parts:
        rows = int(parts[0][1])
    elif all(then.get(name) == now[name] for name in names):
        rows = max(int(str(now[name])) for name in names)
    return Decided(sliced, rows)


def _rows(then: Mapping[str, JsonValue]) -> JsonValue:
    """per_device_train_batch_size of a record, however many of them went together."""
    given = then.get(ROWS_AT_ONCE)
    return int(given.partition(",")[0]) if isinstance(given, str) and AT_A_TIME.fullmatch(given) else given


def _in_slices(tile_numel: int) -> str:
    return f"in slices (tile_numel {tile_numel})"


def bit_differences(then: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[str]:
    """`differences` of `bits_on`, of what both records know: not all versions write down all of it."""
    known = {name for name in then if name in now and then[name] not in NOT_OF_A_MACHINE}
    return differences({name: then[name] for name in known}, {name: now[name] for name in now if name in known})


def differences(then: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[str]:
    """`name was A and is now B`, in the order of `now`. A model setting that only one of two versions knows is none."""
    names = [*now, *(name for name in then if name not in now)]
    return [
        f"{name} was {_shown(then.get(name))} and is now {_shown(now.get(name))}"
        for name in names
        if then.get(name) != now.get(name) and not (name.startswith(MODEL) and not (name in then and name in now))
    ]


def listed(sentences: list[str]) -> str:
    """The first few."""
    rest = len(sentences) - SHOWN
    return "; ".join(sentences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _shown(value: JsonValue) -> str:
    return "not there" if value is None else str(value)


def model(decoder: Decoder) -> dict[str, JsonValue]:
    """Of `maths`, what the model's own config says."""
    settings = json.loads(json.dumps(decoder.config.to_dict(), default=str))
    named = {k: v for k, v in sorted(settings.items()) if not k.startswith("_") and k not in NOT_OF_THE_MODEL}
    return {f"{MODEL}{key}": value for key, value in named.items()}


def _trained(layout: Layout) -> str:
    params = [p for unit in layout.units for p in unit.params if p.trainable]
    text = json.dumps(sorted((p.name, p.shape, p.decay) for p in params))
    return f"{layout.train_numel} in {len(params)} tensors ({_digest(text.encode())})"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
