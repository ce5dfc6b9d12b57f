"""A byte-level tokenizer built in memory: every byte is a token, so token counts in the tests can be counted by eye."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from slideformer.data.tokenizer import Codec

BOS, END, EOS = "<bos>", "<end>", "<eos>"
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_codec(
    *,
    template: str | None = CHATML,
    add_bos: bool = False,
    add_eos: bool = False,
    pad: str | None = EOS,
    stops: tuple[str, ...] = (EOS, END),
    merges: tuple[tuple[str, str], ...] = (),
) -> Codec:
    """Ids: bytes in ByteLevel's alphabet order from 0, then <bos> 256, <end> 257, <eos> 258, and one a merge."""
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
