"""A Hugging Face folder: weights, configs, the tokenizer's files as they were, and a card that says how it was made.

Every weights file is read back from the disk and compared with the sum of what was written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slideformer.data.files import require_inside
from slideformer.engine import Engine
from slideformer.errors import RunFailed
from slideformer.model import files, weights
from slideformer.model.decoder import Decoder
from slideformer.model.folder import read_generation_config, save_model
from slideformer.train.card import CARD, Facts, card, write_card

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
    "chat_template.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save wrote. names: relative to the folder, other files in it left out. sums: of the files of weights."""

    folder: Path
    names: tuple[str, ...]
    sums: dict[str, files.Sum]


def save(engine: Engine, source: Path, target: Path, dtype: torch.dtype, facts: Facts | None = None) -> Saved:
    """Write the engine's weights into `target`, with what `source`, the folder they came from, has beside its own.

    facts: for the model card; None: without one. Raises RunFailed when the engine's state is torn or the disk refuses.
    """
    text = None if facts is None else card(engine.decoder, dtype, facts)
    try:
        return save_folder(target, engine.decoder, engine.read, source, dtype=dtype, card_text=text)
    except OSError as error:
        raise RunFailed(
            f"the model could not be written to {target}: {error.strerror or error}; checkpoints, if there are any, "
            "are as they were: make room, and go on with resume_from_checkpoint or write it with slideformer export"
        ) from error


def save_folder(
    target: Path,
    decoder: Decoder,
    read: weights.Read,
    source: Path,
    *,
    dtype: torch.dtype,
    card_text: str | None,
    max_shard_nbytes: int = 5 * 10**9,
) -> Saved:
    """Write weights that `read` gives (see `weights.save`) and what belongs to them.

    Tokenizer files and chat templates of `source` are copied byte for byte. The model card is written unless `target`
    has one of somebody else's. Raises OSError, and RunFailed when a file does not read back as it was written.
    """
    sums = save_model(
        target,
        decoder,
        read,
        dtype=dtype,
        max_shard_nbytes=max_shard_nbytes,
        generation_config=read_generation_config(source),
    )
    names = list(sums)
    for path in companions(source):
        name = path.relative_to(source)
        if path.resolve() != (target / name).resolve():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target / name)
        names.append(name.as_posix())
    if card_text is not None and write_card(target, card_text):
        names.append(CARD)
    weight_sums = {name: found for name, found in sums.items() if name.endswith(".safetensors")}
    for name, written in weight_sums.items():
        if files.sum_of(target / name) != written:
            raise RunFailed(f"{target / name} does not read back as it was written: the disk is at fault, try another")
    return Saved(target, tuple(names), weight_sums)


def companions(source: Path) -> list[Path]:
    """What a model folder has beside its weights and configs that a copy needs: tokenizer files and chat templates.

    Raises BadInput for one that is a link to a place outside of the folder: a folder from elsewhere could have this
    machine's own files copied into a model that is then given away.
    """
    found = list(_companions(source))
    require_inside(source, found)
    return found


def _companions(source: Path) -> Iterator[Path]:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            yield source / name
    if (source / TEMPLATE_FOLDER).is_dir():
        yield from sorted(path for path in (source / TEMPLATE_FOLDER).glob("*.jinja") if path.is_file())
