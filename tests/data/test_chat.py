"""What of a conversation is learned: markers, incremental rendering, and refusals."""

from __future__ import annotations

import pytest

from slideformer.data import Codec, codec_of
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


def test_a_conversation_that_begins_with_the_assistant_learns_from_its_first_word(make_codec) -> None:
    codec = make_codec()
    messages = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]
    rendered = encode_chat(Chat(messages), codec, "rows.jsonl:1")
    assert learned_text(rendered, codec) == "hello<end>"


def test_a_conversation_without_a_chat_template_is_refused(make_codec) -> None:
    with pytest.raises(BadInput, match="row 3 is a conversation, but the tokenizer of toy has no chat template"):
        encode_chat(Chat(TURNS), make_codec(template=None), "row 3")


def test_a_conversation_that_the_template_refuses_is_unusable(make_codec) -> None:
    codec = make_codec(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UnusableRow, match="roles must alternate") as caught:
        encode_whole_chat(Chat(TURNS), codec, "row")
    assert caught.value.reason is Reason.TEMPLATE


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALLING = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "Rome"}}]},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "It is sunny."},
]
THINKING_CALLER = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}call {{ c.function.name }} {{ c.function.arguments }}{% endfor %}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_call_that_is_rendered_differently_when_its_result_follows_is_found(make_codec) -> None:
    codec = make_codec(template=THINKING_CALLER)
    rendered = encode_chat(Chat(CALLING, tools=[WEATHER]), codec, "row")
    assert learned_text(rendered, codec) == "call weather Rome<end>(thought)It is sunny.<end>"
    assert codec.tokenizer.decode(rendered.ids).startswith("[weather]<|user|>weather?<end>")


def test_a_generation_prompt_with_an_empty_thought_that_earlier_answers_lose_is_followed(make_codec) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and loop.last %}(){% endif %}{{ m['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>(){% endif %}"
    )
    codec = make_codec(template=template)
    assert learned_text(encode_chat(Chat(TURNS), codec, "row"), codec) == "hello<end>ciao<end>"


def test_an_answer_that_changes_what_is_rendered_behind_it_is_refused(make_codec) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>"
        "{% if m['role'] == 'assistant' %}{{ '!' * (messages | length) }}{{ m['content'] | length }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(BadInput, match=r"row: .*cannot be derived .* for messages\[2\]: .*when more messages follow"):
        encode_chat(Chat(TURNS), make_codec(template=template), "row")


def test_the_answers_characters_are_learned_however_tokens_lie_across_their_borders(make_codec) -> None:
    """Both borders inside a token, and a character of several tokens at one."""
    codec = make_codec(merges=((">", "h"), ("h", "i"), (">", "hi")))
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hi ☃"}] * 2
    assert learned_text(encode_chat(Chat(turns), codec, "row"), codec) == ">hi ☃<end>" * 2


def test_further_variables_reach_the_template(make_codec) -> None:
    codec = make_codec(template="{{ mood }}" + MARKED)
    codec = Codec(codec.tokenizer, codec.name, codec.end_ids, {"mood": "calm"})
    assert codec.tokenizer.decode(encode_chat(Chat(TURNS), codec, "row").ids).startswith("calm<|system|>")


def test_a_jinja_file_takes_the_place_of_the_tokenizers_template(codec, make_config, tmp_path) -> None:
    codec.tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "other.jinja"
    path.write_text("{% for m in messages %}{{ m['role'] }}={{ m['content'] }}<end>{% endfor %}")
    found = codec_of(make_config(model_name_or_path=str(tmp_path / "model"), chat_template=str(path)))
    assert (
        found.tokenizer.decode(encode_whole_chat(Chat(TURNS[:2]), found, "row").ids)
        == "system=be kind<end>user=hi<end>"
    )
    with pytest.raises(BadInput, match=r"chat_template: .*none.jinja cannot be read \(No such file"):
        codec_of(make_config(model_name_or_path=str(tmp_path / "model"), chat_template=str(tmp_path / "none.jinja")))


def test_a_template_that_is_no_jinja_is_told_once_and_not_for_every_row(codec, make_config, tmp_path) -> None:
    codec.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    with pytest.raises(
        BadInput, match=r"the chat template of .*broken.jinja is no jinja: .*end of template.* \(line 1\)"
    ):
        codec_of(make_config(model_name_or_path=str(tmp_path / "model"), chat_template=str(tmp_path / "broken.jinja")))
