"""A tokenizer with the facts around it that training needs: end tokens, padding, and the name to use in messages."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slideformer.config import TrainConfig
from slideformer.errors import BadInput

TODAY = "strftime_now"  # what a chat template calls for the date, unless it has a date_string, as Llama 3's


@dataclass(frozen=True)
class Codec:
    """name: what messages call it. end_ids: tokens at which generation stops, eos first.

    template_kwargs: further variables for the chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    end_ids: tuple[int, ...]
    template_kwargs: Mapping[str, object] = field(default_factory=dict)

    @property
    def pad_id(self) -> int:
        """Only fills unused places: no label ever depends on it, so it may well be the end token."""
        for token in (self.tokenizer.pad_token_id, *self.end_ids):
            if token is not None:
                return token
        return 0

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def is_dated(self) -> bool:
        """Whether the chat template prints the date of the day on which it is used."""
        template = self.tokenizer.chat_template
        return TODAY in (template if isinstance(template, str) else "") and "date_string" not in self.template_kwargs

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of every special token, longest first."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(sorted({*added, *self.tokenizer.all_special_tokens}, key=len, reverse=True))

    @cached_property
    def num_added_behind(self) -> int:
        """Special tokens that the tokenizer puts behind a text by itself."""
        bare, whole = self.encode_bare("a"), self.encode("a")
        places = range(len(whole) - len(bare) + 1)
        start = next((i for i in places if whole[i : i + len(bare)] == bare), 0)
        return len(whole) - len(bare) - start

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens that the tokenizer adds by itself."""
        return self.tokenizer(text, verbose=False)["input_ids"]

    def encode_bare(self, text: str) -> list[int]:
        """Ids of text that has its special tokens in it, or is to have none."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text with its special tokens, as it was."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def identity(self) -> str:
        """A digest of all that decides which ids a text and a conversation have."""
        facts = {
            "backend": self.tokenizer.backend_tokenizer.to_str(),
            "template": self.tokenizer.chat_template,
            "template_kwargs": dict(self.template_kwargs),
            "special": self.tokenizer.special_tokens_map,
            "class": type(self.tokenizer).__name__,
            "end_ids": self.end_ids,
        }
        return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def codec_of(config: TrainConfig) -> Codec:
    """The tokenizer of the config's model, with the config's chat template.

    Raises BadInput as `load_tokenizer` and `with_template` do.
    """
    return with_template(load_tokenizer(config.model_name_or_path), config)


def with_template(codec: Codec, config: TrainConfig) -> Codec:
    """The codec with the config's chat template and its variables; the tokenizer that it has is left as it is.

    Raises BadInput: no such file, or a template that is no jinja.
    """
    tokenizer = codec.tokenizer
    if config.chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = _read_template(Path(config.chat_template))
    _require_jinja(tokenizer, config.chat_template or codec.name)
    return Codec(tokenizer, codec.name, codec.end_ids, dict(config.chat_template_kwargs))


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
        missing = not (folder / "tokenizer.json").exists()  # others do, too, but then transformers names a dozen
        why = "it has no tokenizer.json: copy the tokenizer's files there" if missing else _first_line(error)
        raise BadInput(f"no tokenizer can be loaded from {folder}: {why}") from error
    if not tokenizer.is_fast:
        raise BadInput(f"the tokenizer in {folder} has no tokenizer.json, which is needed to know what to train on")
    return Codec(tokenizer, str(folder), _end_ids(tokenizer, folder))


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"chat_template: {path} cannot be read ({error.strerror}): give a jinja file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"chat_template: {path} is not UTF-8: {error}") from None


def _require_jinja(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """That a conversation may not suit the template is found out with each."""
    try:
        if tokenizer.chat_template is not None:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise BadInput(f"the chat template of {where} is no jinja: {error.message} (line {error.lineno})") from None
    except Exception:  # whatever a template raises that wants other messages
        return


def _end_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """eos of the tokenizer, then those of generation_config.json."""
    found = [tokenizer.eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            named = named if isinstance(named, list) else [named]
            if not all(token is None or isinstance(token, int) for token in named):
                raise ValueError("eos_token_id is neither a number nor a list of numbers")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from None
        found += named
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
