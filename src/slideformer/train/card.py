"""The model card: README.md of a saved model, with the facts of the run. No folder of the machine is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from pydantic import JsonValue

from slideformer.model.decoder import Decoder
from slideformer.train.metrics import Metrics
from slideformer.train.redact import redacted_text

CARD = "README.md"
MARK = "<!-- Written by slideformer; a card without this line is never overwritten. -->"
SETTINGS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "packing",
    "seed",
)
"""Of the config, what somebody who wants the same result must know."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a run. metrics: the last of each name that was logged."""

    config: Mapping[str, JsonValue]
    versions: Mapping[str, str]
    metrics: Metrics


def card(decoder: Decoder, dtype: torch.dtype, facts: Facts | None) -> str:
    """README.md for the model hub. facts: None where it is not known how the weights came about."""
    base, dtype_name = _base(facts.config) if facts else None, str(dtype).removeprefix("torch.")
    metadata: dict[str, object] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base and base.count("/") == 1:
        metadata["base_model"] = base
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", MARK, ""]
    lines += [f"# {decoder.architecture}, {decoder.layout.numel / 1e6:,.1f} M parameters, {dtype_name}", ""]
    if facts is None:
        lines += ["The weights of another folder, stored anew by slideformer."]
    else:
        trained = decoder.layout.train_numel
        share = "all of its parameters" if trained == decoder.layout.numel else f"{trained / 1e6:,.1f} M parameters"
        lines += [f"{base}, with {share} fine-tuned by slideformer.", "", *_run(facts)]
    return redacted_text("\n".join(lines) + "\n")


def write_card(folder: Path, text: str) -> bool:
    """Write it unless the folder has one of somebody else's. Returns whether it did."""
    path = folder / CARD
    if path.exists() and not has_card(folder):
        return False
    path.write_text(text, encoding="utf-8")
    return True


def has_card(folder: Path) -> bool:
    """Whether the folder's model card is one of ours."""
    path = folder / CARD
    return path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")


def _base(config: Mapping[str, JsonValue]) -> str:
    """The name on the hub if the folder lies in its cache (.../models--ORG--NAME/snapshots/...), else the folder's."""
    path = Path(str(config.get("model_name_or_path", "")))
    for part in path.parts:
        if part.startswith("models--") and part.count("--") == 2:
            return "/".join(part.split("--")[1:])
    return path.name or "an unnamed model"


def _run(facts: Facts) -> list[str]:
    config, metrics = facts.config, facts.metrics
    sets = config.get("dataset")
    names = [Path(str(one["path"])).name for one in sets if isinstance(one, dict)] if isinstance(sets, list) else []
    rows = {
        "data": ", ".join(names),
        "steps": metrics.get("global_step"),
        "epochs": metrics.get("epoch"),
        "tokens seen": metrics.get("num_input_tokens_seen"),
        "tokens learned from": metrics.get("num_target_tokens_seen"),
        **{name: metrics[name] for name in metrics if name == "loss" or name.startswith("eval_")},
        **{name: config.get(name) for name in SETTINGS},
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
    }
    table = [f"| {name} | {_shown(value)} |" for name, value in rows.items() if value is not None and value != ""]
    return ["| | |", "|---|---|", *table]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "\\|")  # one line, whatever a name holds
