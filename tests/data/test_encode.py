"""Text, prompt and completion, instructions and token ids; end tokens, and rows that are too long."""

from __future__ import annotations

import numpy as np
import pytest

from slideformer.data import load_tokenizer
from slideformer.data.encode import IGNORED, Encoded, EncodingRules, Remark, encode_row
from slideformer.data.formats import RowFormat
from slideformer.data.rows import Block, RawRow, Reason, UnusableRow
from slideformer.errors import BadInput

EOS_ID = 258


def chat(*turns: str) -> dict[str, object]:
    """A row of messages: user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def encode(columns: object, codec, config) -> list[Encoded]:
    return list(encode_row(RawRow("rows.jsonl", 5, columns), RowFormat(), codec, EncodingRules.of(config)))


def encode_one(columns: object, codec, config) -> Encoded:
    (sample,) = encode(columns, codec, config)
    return sample


def learned(sample: Encoded, codec) -> str:
    return codec.tokenizer.decode(sample.labels[sample.labels != IGNORED])


@pytest.mark.parametrize("adds", ["nothing", "bos", "eos", "both"])
def test_plain_text_gets_one_end_token_and_the_tokenizers_own_bos_once(make_codec, make_config, adds) -> None:
    codec = make_codec(add_bos=adds in ("bos", "both"), add_eos=adds in ("eos", "both"))
    sample = encode_one({"text": "abc"}, codec, make_config())
    expected = ("<bos>" if adds in ("bos", "both") else "") + "abc<eos>"
    assert codec.tokenizer.decode(sample.input_ids) == expected
    assert sample.labels.tolist() == sample.input_ids.tolist()


def test_the_label_of_a_real_end_token_is_the_end_token_though_it_is_also_the_pad_token(codec, make_config) -> None:
    assert codec.pad_id == EOS_ID
    sample = encode_one({"text": "abc"}, codec, make_config())
    assert sample.labels[-1] == EOS_ID


@pytest.mark.parametrize("only", [True, False])
def test_of_prompt_and_completion_only_the_completion_is_learned_unless_asked(codec, make_config, only) -> None:
    sample = encode_one({"prompt": "2+2=", "completion": "4"}, codec, make_config(completion_only_loss=only))
    assert learned(sample, codec) == ("4<eos>" if only else "2+2=4<eos>")


def test_the_boundary_of_a_completion_is_the_common_prefix_of_the_ids(make_codec, make_config) -> None:
    codec = make_codec(merges=(("=", "4"),), add_bos=True, add_eos=True)
    sample = encode_one({"prompt": "2+2=", "completion": "4"}, codec, make_config())
    assert learned(sample, codec) == "=4<eos>"


def test_prompt_and_completion_as_messages_learn_the_completion(codec, make_config) -> None:
    turns = chat("a", "b", "c", "d")["messages"]
    sample = encode_one({"prompt": turns[:3], "completion": turns[3:]}, codec, make_config())
    assert learned(sample, codec) == "d<end>"


def test_with_its_prompt_all_of_a_row_is_learned_and_a_conversation_as_it_says(codec, make_config) -> None:
    turns, whole = chat("a", "b")["messages"], make_config(completion_only_loss=False)
    for row in ({"prompt": turns[:1], "completion": turns[1:]}, {"instruction": "a", "output": "b"}):
        sample = encode_one(row, codec, whole)
        assert sample.labels.tolist() == sample.input_ids.tolist()
    assert learned(encode_one(chat("a", "b"), codec, whole), codec) == "b<end>"


def test_an_instruction_is_a_conversation_where_there_is_a_template_and_a_prompt_where_there_is_none(
    make_codec, make_config
) -> None:
    row = {"instruction": "add", "input": "2 2", "output": "4"}
    codec = make_codec()
    sample = encode_one(row, codec, make_config())
    assert codec.tokenizer.decode(sample.input_ids) == "<|user|>add\n2 2<end>\n<|assistant|>4<end>\n"
    assert learned(sample, codec) == "4<end>"
    bare = make_codec(template=None)
    sample = encode_one(row, bare, make_config())
    text = bare.tokenizer.decode(sample.input_ids)
    assert text.endswith("### Instruction:\nadd\n\n### Input:\n2 2\n\n### Response:\n4<eos>")
    assert learned(sample, bare) == "4<eos>"
    without = bare.tokenizer.decode(encode_one({**row, "input": ""}, bare, make_config()).input_ids)
    assert without.endswith("### Instruction:\nadd\n\n### Response:\n4<eos>")


def test_token_ids_are_taken_as_they_are_and_cut_like_text(codec, make_config) -> None:
    sample = encode_one({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, codec, make_config())
    assert (sample.input_ids.tolist(), sample.labels.tolist()) == ([5, 6, 7], [-100, 6, -100])
    assert encode_one({"input_ids": [5, 6, 7]}, codec, make_config()).labels.tolist() == [5, 6, 7]
    cut = encode_one({"input_ids": [5, 6, 7]}, codec, make_config(max_length=2))
    assert (cut.input_ids.tolist(), cut.remarks, cut.num_cut) == ([5, 6], Remark.TRUNCATED, 1)


@pytest.mark.parametrize("adds", [False, True])
def test_a_document_is_cut_into_pieces_and_loses_nothing(make_codec, make_config, adds) -> None:
    codec = make_codec(add_bos=adds, add_eos=adds)
    config = make_config(max_length=4)
    blocks = (Block("abcdef", ends=False), Block("ghi", starts=False, ends=False), Block("jk", starts=False))
    pieces = [piece for block in blocks for piece in encode(block, codec, config)]
    text = codec.tokenizer.decode(np.concatenate([piece.input_ids for piece in pieces]))
    assert text == ("<bos>" if adds else "") + "abcdefghijk<eos>"
    assert max(len(piece.input_ids) for piece in pieces) == 4
    assert all((piece.labels == piece.input_ids).all() for piece in pieces)


def test_a_last_piece_of_one_token_is_left_out_because_nothing_in_it_can_be_predicted(codec, make_config) -> None:
    pieces = encode(Block("abcd"), codec, make_config(max_length=4))
    assert [codec.tokenizer.decode(p.input_ids) for p in pieces] == ["abcd"]


def test_a_prompt_that_fills_max_length_leaves_no_target(codec, make_config) -> None:
    with pytest.raises(
        UnusableRow, match="no target tokens left: none of its 32 tokens is to be learned after cutting"
    ):
        encode_one({"prompt": "x" * 64, "completion": "y"}, codec, make_config(max_length=32))


def test_a_learned_first_token_alone_is_no_target(make_codec, make_config) -> None:
    # Nothing stands before the first token, so nothing can predict it.
    silent = make_codec(stops=())
    with pytest.raises(UnusableRow) as caught:
        encode_one({"text": "a"}, silent, make_config())
    assert caught.value.reason is Reason.NO_TARGET
    assert encode_one({"text": "ab"}, silent, make_config()).num_target_tokens == 1


def test_too_long_is_cut_and_remarked_dropped_or_raised(codec, make_config) -> None:
    row = {"prompt": "abc", "completion": "defgh"}
    cut = encode_one(row, codec, make_config(max_length=6))
    assert (learned(cut, codec), cut.remarks, cut.num_cut) == ("def", Remark.TRUNCATED, 3)
    with pytest.raises(UnusableRow, match="too long: 9 tokens, max_length is 6"):
        encode_one(row, codec, make_config(max_length=6, excess_length_strategy="drop"))
    with pytest.raises(BadInput, match="rows.jsonl:5: too long: 9 tokens, max_length is 6: raise max_length"):
        encode_one(row, codec, make_config(max_length=6, excess_length_strategy="raise"))


def test_an_answer_that_does_not_end_with_a_stop_token_is_remarked(make_codec, make_config) -> None:
    ended = encode_one(chat("q", "a"), make_codec(), make_config())
    assert ended.remarks == Remark.NONE
    not_a_stop = encode_one(chat("q", "a"), make_codec(stops=("<eos>",)), make_config())
    assert not_a_stop.remarks == Remark.UNTERMINATED


def test_one_answer_of_several_without_an_end_token_is_enough_for_the_remark(make_codec, make_config) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'user' %}{{ m['content'] }}<end>{% else %}"
        "{% generation %}{{ m['content'] }}{{ '<end>' if loop.last else '' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    found = encode_one(chat("q", "a", "r", "b"), make_codec(template=template), make_config())
    assert found.remarks == Remark.UNTERMINATED


def test_a_row_of_which_all_is_learned_is_remarked_when_prompts_should_not_be(codec, make_config) -> None:
    assert encode_one({"prompt": "", "completion": "abc"}, codec, make_config()).remarks == Remark.UNMASKED
    whole = make_config(completion_only_loss=False)
    assert encode_one({"prompt": "a", "completion": "abc"}, codec, whole).remarks == Remark.NONE


def test_num_target_tokens_leaves_out_the_first_token(codec, make_config) -> None:
    sample = encode_one({"text": "abc"}, codec, make_config())
    assert (len(sample.input_ids), sample.num_target_tokens) == (4, 3)


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_says_which(make_codec, tmp_path) -> None:
    make_codec().tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=f"^no tokenizer can be loaded from {tmp_path}: Expecting property name"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=f"^no tokenizer can be loaded from {tmp_path}: it has no tokenizer.json: copy"):
        load_tokenizer(tmp_path)
