"""A tokenizer with the facts around it that training needs: end tokens, padding, and the name to use in messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slideformer.config import TrainConfig
from slideformer.errors import BadInput


@dataclass(frozen=True)
class Codec:
    """name: what messages call it. end_ids: tokens at which generation stops, eos first."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    end_ids: tuple[int, ...]

    @property
    def pad_id(self) -> int:
        """Only fills unused places: no label ever depends on it, so it may well be the end token."""
        for token in (self.tokenizer.pad_token_id, *self.end_ids):
            if token is not None:
                return token
        return 0

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of every special token, longest first."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(sorted({*added, *self.tokenizer.all_special_tokens}, key=len, reverse=True))

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens that the tokenizer adds by itself."""
        return self.tokenizer(text)["input_ids"]


def codec_of(config: TrainConfig) -> Codec:
    """The tokenizer of the config's model. Raises as `load_tokenizer` does."""
    return load_tokenizer(config.model_name_or_path)


def load_tokenizer(folder: Path | str) -> Codec:
    """The tokenizer of a model folder. Raises BadInput: no folder, no tokenizer in it, one without offsets."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(
            f"there is no model folder {folder}: give a folder with config.json, tokenizer.json and *.safetensors "
            "(a model of the hub is downloaded first: hf download NAME --local-dir FOLDER)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken folder makes transformers raise
        raise BadInput(f"no tokenizer can be loaded from {folder}: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise BadInput(f"the tokenizer in {folder} has no tokenizer.json, which is needed to know what to train on")
    return Codec(tokenizer, str(folder), _end_ids(tokenizer, folder))


def _end_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """eos of the tokenizer, then those of generation_config.json."""
    found = [tokenizer.eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise BadInput(f"{path} is not valid JSON: {error}") from None
        found += named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
