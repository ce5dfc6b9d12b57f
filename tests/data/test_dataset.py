"""Files as a whole: counts by reason, strictness, unreadable files and unknown layouts."""

from __future__ import annotations

import re

import pytest

from slideformer.data import dataset, workers
from slideformer.data.dataset import load_dataset, require_vocabulary, training_batches
from slideformer.data.report import Tally
from slideformer.data.rows import Reason
from slideformer.errors import BadInput


def chat(asked: str, answered: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


GOOD = chat("hello", "hi")
NO_ASSISTANT = {"messages": [{"role": "user", "content": "hello"}]}
EMPTY = chat("hello", " ")
BAD_ROLE = {"messages": [{"role": "human", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
LONG = chat("hello", "x" * 100)
NOT_TEXT = {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "hi"}]}
SIX = (GOOD, NO_ASSISTANT, EMPTY, BAD_ROLE, LONG, NOT_TEXT)


def test_every_row_that_is_left_out_is_counted_by_reason_with_its_number(codec, make_config, write_rows) -> None:
    path = write_rows(*SIX)
    config = make_config(str(path), max_length=64, excess_length_strategy="drop")
    (report,) = load_dataset(config, codec).reports
    assert (report.rows_read, report.rows_kept) == (6, 1)
    assert report.dropped == {
        Reason.NO_ASSISTANT: Tally(1, ["2"]),
        Reason.EMPTY_ANSWER: Tally(1, ["3"]),
        Reason.BAD_ROLE: Tally(1, ["4"]),
        Reason.TOO_LONG: Tally(1, ["5"]),
        Reason.NOT_TEXT: Tally(1, ["6"]),
    }
    expected = "<|user|>hello<end>\n<|assistant|>hi<end>\n"
    num_tokens = len(expected) - 2 * len("<end>") + 2
    assert (report.tokens, report.target_tokens) == (num_tokens, 3)
    assert report.lines()[0] == f"{path}: 1 of 6 rows for training, {num_tokens} tokens, 3 supervised (9%)"
    assert "  left out, empty answer: 1 row (3)" in report.lines()


def test_rows_cut_to_max_length_are_counted(codec, make_config, write_rows) -> None:
    (report,) = load_dataset(make_config(str(write_rows(GOOD, LONG)), max_length=64), codec).reports
    assert report.rows_kept == 2
    num_tokens = len("<|user|>hello\n<|assistant|>\n") + 100 + 2
    assert report.lines()[1:] == [f"  cut to max_length: 1 row (2), {num_tokens - 64} tokens"]


def test_what_is_hardly_meant_is_a_warning_and_not_a_line(make_codec, make_config, write_rows) -> None:
    codec = make_codec(stops=("<eos>",))
    (report,) = load_dataset(make_config(str(write_rows(GOOD))), codec).reports
    assert len(report.lines()) == 1
    (warning,) = report.warnings()
    assert warning.endswith("an answer without an end token, so the model does not learn to stop: 1 row (1)")


def test_strict_stops_at_the_first_row_that_cannot_be_used(codec, make_config, write_rows) -> None:
    path = write_rows(*SIX)
    with pytest.raises(BadInput, match=re.escape(f"{path}:2: no assistant message: found roles user (strict is true)")):
        load_dataset(make_config(str(path), strict=True), codec)


def test_a_file_without_a_usable_row_quotes_the_first_and_what_was_expected(codec, make_config, write_rows) -> None:
    path = write_rows(*SIX[1:4])
    expected = re.escape(
        f"no row of {path} can be used, of 3: the first is {path}:1: no assistant message: found roles"
    )
    with pytest.raises(BadInput, match=expected + r".*expected \{\"messages\""):
        load_dataset(make_config(str(path)), codec)


def test_prompts_that_all_fill_max_length_are_an_error(codec, make_config, write_rows) -> None:
    path = write_rows(*[{"prompt": "x" * 64, "completion": "y"}] * 2)
    with pytest.raises(BadInput, match="no target tokens left"):
        load_dataset(make_config(str(path), max_length=32), codec)


def test_a_prompt_that_fills_max_length_among_others_is_counted_and_left_out(codec, make_config, write_rows) -> None:
    path = write_rows(*({"prompt": prompt, "completion": "y"} for prompt in ("a", "x" * 64, "b", "z" * 32)))
    data = load_dataset(make_config(str(path), max_length=32), codec)
    (report,) = data.reports
    assert report.dropped == {Reason.NO_TARGET: Tally(2, ["2", "4"])}
    assert "  left out, no target tokens left: 2 rows (2, 4)" in report.lines()
    assert [sample.where for sample in data.train[0].samples] == [f"{path}:1", f"{path}:3"]


def test_an_unknown_layout_lists_the_columns_found_and_the_layouts_accepted(codec, make_config, write_rows) -> None:
    path = write_rows({"question": "a", "answer": "b"})
    expected = re.escape(f"{path}:1: no layout fits its columns (question, answer): accepted are")
    with pytest.raises(BadInput, match=expected + r".*\"prompt\".*\"text\".*dataset_text_field names another"):
        load_dataset(make_config(str(path)), codec)


def test_dataset_text_field_names_the_text_column(codec, make_config, write_rows) -> None:
    path = write_rows({"body": "abc", "messages": "something else"})
    dataset = load_dataset(make_config(str(path), dataset_text_field="body"), codec)
    assert codec.tokenizer.decode(dataset.train[0].samples[0].input_ids) == "abc<eos>"
    with pytest.raises(BadInput, match="dataset_text_field: content in place of text"):
        load_dataset(make_config(str(write_rows({"body": "abc"})), dataset_text_field="content"), codec)


def test_val_size_takes_the_same_rows_out_of_training_for_the_same_seed(codec, make_config, write_rows) -> None:
    path = str(write_rows(*[{"text": f"row {i}"} for i in range(20)]))

    def split(**fields):
        dataset = load_dataset(make_config(path, **fields), codec)
        return [s.where for s in dataset.train[0].samples], [s.where for s in dataset.evaluation[""]]

    train, held_out = split(val_size=0.2)
    assert len(held_out) == 4
    dataset = load_dataset(make_config(path, val_size=0.2, packing=True, max_length=14), codec)
    (report,) = dataset.reports
    batches = training_batches(dataset, make_config(path, packing=True, max_length=14), codec)
    assert "  held out for evaluation: 4 samples" in report.lines()
    tokens = sum(len(sample) for sample in dataset.train[0].samples)
    assert (
        report.lines()[-1]
        == f"  packed into {batches.num_packs[0]} rows, {tokens / batches.num_packs[0] / 14:.0%} full"
    )
    assert not set(train) & set(held_out)
    assert len(train) == 16
    assert split(val_size=4) == (train, held_out)
    assert split(val_size=4, data_seed=1)[1] != held_out
    with pytest.raises(BadInput, match="val_size is 20, but there are only 20 training rows"):
        split(val_size=20)


def test_evaluation_files_keep_their_names(codec, make_config, write_rows) -> None:
    train = str(write_rows({"text": "abc"}))
    one, two = str(write_rows({"text": "one"}, name="1.jsonl")), str(write_rows({"text": "two"}, name="2.jsonl"))
    dataset = load_dataset(make_config(train, eval_dataset={"a": one, "b": two}), codec)
    assert list(dataset.evaluation) == ["a", "b"]
    assert [r.role for r in dataset.reports] == ["training", "evaluation (a)", "evaluation (b)"]


def test_a_token_that_the_model_has_no_row_for_is_told_with_its_row(codec, make_config, write_rows) -> None:
    good = write_rows(*[{"text": "abc"}] * 3, name="good.jsonl")
    path = write_rows(*[{"input_ids": [1, 2]}] * 3, {"input_ids": [5, 400, 5], "labels": [5, -100, 5]})
    for fields in ({}, {"val_size": 0.5}):
        found = load_dataset(make_config([str(good), str(path)], **fields), codec)
        require_vocabulary(found, 401)
        with pytest.raises(BadInput, match=re.escape(f"{path}:4 has token 400, and the model knows 400: use the tok")):
            require_vocabulary(found, 400)
    with pytest.raises(BadInput, match="good.jsonl:1 has token 258, and the model knows 258"):
        require_vocabulary(load_dataset(make_config(str(good)), codec), 258)


def test_who_waits_hears_how_far_it_is(codec, make_config, write_rows, monkeypatch) -> None:
    monkeypatch.setattr(dataset, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(workers, "CHUNK_ROWS", 2)
    path = write_rows(*[GOOD] * 5)
    told: list[str] = []
    load_dataset(make_config(str(path), dataset_cache_dir=None), codec, told.append)
    for line, count in zip(told, (2, 4, 5), strict=True):
        assert re.fullmatch(re.escape(f"{path}: {count} rows, ") + r"[\d,]+ a second", line)
