"""A checkpoint, or a model folder, as a Hugging Face folder. No engine: planes are read from disk a tile at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue

from slideformer.config import TrainConfig
from slideformer.config.faults import WrongSettings
from slideformer.errors import BadInput, RunFailed
from slideformer.layout import Layout
from slideformer.model import files, tensorfile, weights
from slideformer.model.decoder import Decoder
from slideformer.model.folder import CONFIG, read_config
from slideformer.optim import join
from slideformer.train import checkpoint, fingerprint
from slideformer.train.card import Facts, card, has_card
from slideformer.train.checkpoint import Checkpoint, Damaged
from slideformer.train.metrics import METRICS, Metrics, lines_until
from slideformer.train.output import claimed
from slideformer.train.record import FILE as RUN
from slideformer.train.retention import numbered
from slideformer.train.save import Saved, companions, save_folder
from slideformer.train.setup import build_decoder, save_dtype

TILE_NUMEL = 1 << 22
ELSEWHERE = "choose another folder, or --overwrite to write there all the same"


@dataclass(frozen=True, slots=True)
class Source:
    """Weights to export. read: as `weights.save` asks. model: the folder with tokenizer and configs."""

    folder: Path
    model: Path
    decoder: Decoder
    read: weights.Read
    dtype: torch.dtype
    facts: Facts | None


def export(
    source: Source,
    target: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_nbytes: int,
    overwrite: bool = False,
) -> Saved:
    """Write `source` to `target` and read it back. dtype: None is what the run or the folder itself says.

    Raises BadInput when the target is the source, has files that are not an earlier export's (unless overwrite is set),
    or is written to by another process, and RunFailed when the disk refuses.
    """
    if target.resolve() in (source.folder.resolve(), source.model.resolve()):
        raise BadInput(f"the target, {target}, is where the weights come from: choose another folder")
    if not overwrite:
        require_own(target)
    companions(source.model)
    dtype = dtype or source.dtype
    with claimed(target):
        try:
            return save_folder(
                target,
                source.decoder,
                source.read,
                source.model,
                dtype=dtype,
                card_text=card(source.decoder, dtype, source.facts),
                max_shard_nbytes=max_shard_nbytes,
            )
        except OSError as error:
            raise RunFailed(
                f"{target} could not be written: {error.strerror or error}: make room or choose another"
            ) from error


def require_own(target: Path) -> None:
    """Raise BadInput for a folder with files that an export would mix with its own or replace."""
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if RUN in names:
        raise BadInput(f"{target} is the output_dir of a run, whose result this would replace: {ELSEWHERE}")
    if names and not has_card(target):
        raise BadInput(f"{target} has files that are not an earlier export's ({what}): {ELSEWHERE}")


def find_source(folder: Path, model: Path | None) -> Source:
    """What `folder` holds: a checkpoint, a model, or, if neither, the newest complete checkpoint inside.

    model: the folder of the model that the run started from, where it is no longer where it was. Reads a checkpoint
    whole, to compare its checksums. Raises BadInput.
    """
    if (folder / checkpoint.MANIFEST).is_file():
        return _of_checkpoint(folder, model)
    if (folder / CONFIG).is_file():
        return _of_model(folder)
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}: give a checkpoint, the output_dir of a run, or a model")
    for _, path in numbered(folder):
        if checkpoint.is_complete(path):
            return _of_checkpoint(path, model)
    raise BadInput(f"{folder} holds no model and no complete checkpoint: give a folder that has one")


def _of_model(folder: Path) -> Source:
    decoder = Decoder(read_config(folder), dtype=torch.float32, tile_numel=TILE_NUMEL, disable_dropout=True)
    read = weights.reader(folder, decoder.layout, names=decoder.names)
    return Source(folder, folder, decoder, read, decoder.config.dtype or torch.float32, _facts_of_model(folder))


def _of_checkpoint(folder: Path, model: Path | None) -> Source:
    try:
        found = checkpoint.open_checkpoint(folder)
        _compare_sums(found)
        config = TrainConfig.model_validate(
            {**found.record.config, **({"model_name_or_path": str(model)} if model else {})}
        )
    except Damaged as error:
        raise BadInput(f"{folder} cannot be exported: {error}") from None
    except WrongSettings as wrong:
        raise BadInput(f"{folder} is of another version of slideformer: {wrong}") from None
    source = Path(config.model_name_or_path)
    if not source.is_dir():
        raise BadInput(f"the model that {folder} started from is not in {source}: say where it is with --model")
    decoder = build_decoder(config, "cpu", torch.device("cpu"))
    if differ := fingerprint.differences(_of_the_model(found.record.maths), _of_the_model(fingerprint.model(decoder))):
        raise BadInput(f"{source} is not the model that {folder} is of: {fingerprint.listed(differ)}: give --model")
    return Source(
        folder, source, decoder, _Planes(found, decoder.layout).read, save_dtype(config, decoder), _facts(found)
    )


def _of_the_model(maths: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {name: value for name, value in maths.items() if name.startswith(fingerprint.MODEL)}


def _compare_sums(found: Checkpoint) -> None:
    """Raise Damaged unless every file is what the manifest says."""
    for name, wanted in found.sums.items():
        if files.sum_of(found.folder / name).crc32 != wanted.crc32:
            raise Damaged(f"{name} does not have the checksum that {checkpoint.MANIFEST} gives for it")


class _Planes:
    """The masters of a checkpoint."""

    def __init__(self, found: Checkpoint, layout: Layout) -> None:
        self._layout = layout
        self._entries = [
            tensorfile.read_header(found.folder / checkpoint.unit_file(index)) for index in range(len(layout.units))
        ]

    def read(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """fp32 [stop - start] of a unit's flat vector, within one parameter. What is frozen may have no residual."""
        offsets = self._layout.units[unit].offsets
        name, offset = max(((n, o) for n, o in offsets.items() if o <= start), key=lambda pair: pair[1])
        entries = self._entries[unit]
        weight = tensorfile.values(entries[f"weight.{name}"], start - offset, stop - offset)
        residual = entries.get(f"residual.{name}")
        if residual is None:
            return weight.float()
        return join(weight, tensorfile.values(residual, start - offset, stop - offset))


def _facts(found: Checkpoint) -> Facts:
    record, progress = found.record, found.record.progress
    metrics = _last_metrics(lines_until(found.folder.parent / METRICS, progress.step, evaluated=progress.evaluated))
    seen: Metrics = {
        "global_step": progress.step,
        "num_input_tokens_seen": progress.num_input_tokens_seen,
        "num_target_tokens_seen": progress.num_target_tokens_seen,
    }
    return Facts(record.config, record.versions, {**metrics, **seen})


def _last_metrics(lines: str) -> dict[str, float | int | None]:
    found: dict[str, float | int | None] = {}
    for line in lines.splitlines():
        found |= json.loads(line)
    return found


def _facts_of_model(folder: Path) -> Facts | None:
    """From the run.json beside the model that a run has written."""
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        return Facts(dict(run["config"]), dict(run["versions"]), dict(run["last_metrics"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def gguf_command(folder: Path, dtype: torch.dtype) -> str:
    """How llama.cpp makes one file of a folder."""
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype, "f32")
    name = f"{folder.resolve().name}-{kind}.gguf"
    return f"python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {name} --outtype {kind}"
