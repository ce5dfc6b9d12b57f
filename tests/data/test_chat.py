"""What of a conversation is learned: markers, incremental rendering, and refusals."""

from __future__ import annotations

import pytest

from slideformer.data.chat import encode_chat, encode_whole_chat
from slideformer.data.rows import Chat, Reason, UnusableRow
from slideformer.errors import BadInput

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<end>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def learned_text(rendered, codec) -> str:
    return codec.tokenizer.decode([i for i, m in zip(rendered.ids, rendered.learned, strict=True) if m])


@pytest.mark.parametrize("template", ["rendering", "markers"])
def test_learned_is_each_assistant_text_with_its_end_token(make_codec, template) -> None:
    codec = make_codec(template=MARKED) if template == "markers" else make_codec()
    rendered = encode_chat(Chat(TURNS), codec, "row")
    assert learned_text(rendered, codec) == "hello<end>ciao<end>"
    assert codec.tokenizer.decode(rendered.ids).startswith(
        "<|system|>be kind<end>\n<|user|>hi<end>\n<|assistant|>hello"
    )


def test_both_derivations_give_the_same_ids_and_mask(make_codec) -> None:
    marked, plain = make_codec(template=MARKED), make_codec()
    assert encode_chat(Chat(TURNS), marked, "row") == encode_chat(Chat(TURNS), plain, "row")


@pytest.mark.parametrize("template", ["rendering", "markers"])
def test_answers_before_answers_from_are_not_learned(make_codec, template) -> None:
    codec = make_codec(template=MARKED) if template == "markers" else make_codec()
    rendered = encode_chat(Chat(TURNS, answers_from=4), codec, "row")
    assert learned_text(rendered, codec) == "ciao<end>"


def test_whole_chat_learns_everything(codec) -> None:
    rendered = encode_whole_chat(Chat(TURNS), codec, "row")
    assert all(rendered.learned)
    assert rendered.ids == encode_chat(Chat(TURNS), codec, "row").ids


def test_a_template_that_prints_bos_gives_one_bos_though_the_tokenizer_adds_one(make_codec) -> None:
    template = "<bos>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    codec = make_codec(template=template, add_bos=True)
    rendered = encode_chat(Chat(TURNS), codec, "row")
    assert rendered.ids.count(codec.tokenizer.bos_token_id) == 1
    assert rendered.ids[0] == codec.tokenizer.bos_token_id
    assert learned_text(rendered, codec) == "hello<end>ciao<end>"


def test_a_token_that_joins_prompt_and_answer_is_learned_as_at_generation(make_codec) -> None:
    codec = make_codec(merges=((">", "h"),))
    rendered = encode_chat(Chat(TURNS), codec, "row")
    assert learned_text(rendered, codec) == ">hello<end>ciao<end>"


def test_a_template_that_drops_thoughts_of_earlier_answers_is_followed(make_codec) -> None:
    thinking = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}{{ m['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    codec = make_codec(template=thinking)
    assert learned_text(encode_chat(Chat(TURNS), codec, "row"), codec) == "hello<end>(thought)ciao<end>"


def test_a_template_whose_answers_cannot_be_found_is_refused_with_template_and_row(make_codec) -> None:
    counting = "{% for m in messages %}[{{ messages | length }}]{{ m['content'] }}<end>{% endfor %}"
    codec = make_codec(template=counting)
    with pytest.raises(
        BadInput, match=r"rows.jsonl:7: .* chat template of toy for messages\[2\]: its generation prompt"
    ):
        encode_chat(Chat(TURNS), codec, "rows.jsonl:7")
    shouting = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{{ m['content'] if loop.last else m['content'] | upper }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    codec = make_codec(template=shouting)
    late = [*TURNS[1:3], {"role": "assistant", "content": "more"}]
    with pytest.raises(BadInput, match=r"rows.jsonl:7: .*cannot be derived"):
        encode_chat(Chat(late), codec, "rows.jsonl:7")


def test_a_conversation_without_a_chat_template_is_refused(make_codec) -> None:
    with pytest.raises(BadInput, match="row 3 is a conversation, but the tokenizer of toy has no chat template"):
        encode_chat(Chat(TURNS), make_codec(template=None), "row 3")


def test_a_conversation_that_the_template_refuses_is_unusable(make_codec) -> None:
    codec = make_codec(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UnusableRow, match="roles must alternate") as caught:
        encode_whole_chat(Chat(TURNS), codec, "row")
    assert caught.value.reason is Reason.TEMPLATE
