"""A byte-level tokenizer built in memory: every byte is a token, so token counts in the tests can be counted by eye."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from slideformer.config import TrainConfig
from slideformer.data.tokenizer import Codec

BOS, END, EOS = "<bos>", "<end>", "<eos>"
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def make_codec() -> Callable[..., Codec]:
    """Ids: bytes in ByteLevel's alphabet order from 0, then <bos> 256, <end> 257, <eos> 258, and one a merge."""

    def make(
        *,
        template: str | None = CHATML,
        add_bos: bool = False,
        add_eos: bool = False,
        pad: str | None = EOS,
        stops: tuple[str, ...] = (EOS, END),
        merges: tuple[tuple[str, str], ...] = (),
    ) -> Codec:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: i for i, token in enumerate([*alphabet, BOS, END, EOS, *(a + b for a, b in merges)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS, END, EOS)])
        if add_bos or add_eos:
            single = f"{BOS} $A" if add_bos else "$A"
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{single} {EOS}" if add_eos else single,
                special_tokens=[(BOS, vocab[BOS]), (EOS, vocab[EOS])],
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=pad, chat_template=template
        )
        return Codec(fast, "toy", tuple(vocab[token] for token in stops))

    return make


@pytest.fixture
def codec(make_codec: Callable[..., Codec]) -> Codec:
    return make_codec()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects as JSON lines (text as it is) into a file of its own and returns its path."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_config() -> Callable[..., TrainConfig]:
    def make(dataset: object = "unused.jsonl", **fields: object) -> TrainConfig:
        return TrainConfig.model_validate({"model_name_or_path": "toy", "dataset": dataset, **fields})

    return make
