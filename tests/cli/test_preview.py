"""slideformer preview: what is shown is what the tensors hold."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

from slideformer.data import codec_of, load_dataset, training_batches
from train.toy import make_config, write_sums


def previewed(slideformer, *words: object) -> dict:
    done = slideformer("preview", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_are_those_of_the_tensors_that_the_trainer_passes_on(slideformer, yaml_for, toy, tmp_path) -> None:
    shown = previewed(slideformer, yaml_for(per_device_train_batch_size=3, gradient_accumulation_steps=2), "--rows", 7)
    config = make_config(toy / "model", toy / "rows.jsonl", tmp_path / "out", per_device_train_batch_size=3)
    config = config.model_copy(update={"gradient_accumulation_steps": 2})
    codec = codec_of(config)
    batches = training_batches(load_dataset(config, codec), config, codec)
    expected = [
        (step, m + 1, r + 1, micro.input_ids[r].tolist(), micro.labels[r].tolist())
        for step in (1, 2)
        for m, micro in enumerate(batches.step(step - 1).micro_batches)
        for r in range(len(micro.input_ids))
    ]
    found = [(r["step"], r["micro_batch"], r["row"], r["input_ids"], r["labels"]) for r in shown["rows"]]
    assert found == expected[:7]


def test_text_and_counts_follow_from_ids_and_labels(slideformer, yaml_for) -> None:
    for fields in ({"per_device_train_batch_size": 4}, {"packing": True, "max_length": 70}):
        shown = previewed(slideformer, yaml_for(**fields), "--rows", 6)
        assert shown["data"][0]["rows_kept"] == 12
        for row in shown["rows"]:
            assert row["num_tokens"] + row["num_padding"] == len(row["input_ids"])
            assert row["num_trained"] == sum(label != -100 for label in row["labels"][1:])
            assert sum(sample["num_tokens"] for sample in row["samples"]) == row["num_tokens"]
            for sample in row["samples"]:
                trained = "".join(s["text"] for s in sample["segments"] if s["trained"])
                other = "".join(s["text"] for s in sample["segments"] if not s["trained"])
                assert re.fullmatch(r"\d+<end>", trained)
                assert re.fullmatch(r"<\|user\|>\d+\+\d+<end>\n<\|assistant\|>\n", other)
                a, b = map(int, re.search(r"(\d+)\+(\d+)", other).groups())
                assert trained == f"{a + b}<end>"
        if "packing" in fields:
            assert len(shown["rows"][0]["samples"]) > 1
            assert shown["rows"][0]["position_ids"].count(0) >= len(shown["rows"][0]["samples"])


def test_without_colour_trained_text_stands_in_brackets(slideformer, yaml_for) -> None:
    done = slideformer("preview", yaml_for(), "--rows", "1", "--step", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r".*rows.jsonl: 12 of 12 rows for training, \d+ tokens, \d+ supervised \(\d+%\)", lines[0])
    assert "2 steps of 1 x 1 rows; trained tokens are ⟦like this⟧" in lines
    assert any(
        re.fullmatch(r"step 2, micro-batch 1, row 1: \d+ tokens, \d+ trained \(\d+%\), 0 padding", x) for x in lines
    )
    assert re.fullmatch(r"<\|assistant\|>⟦\d+<end>⟧", lines[-2])


def test_on_a_terminal_trained_text_is_green(yaml_for, tmp_path) -> None:
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "TERM": "xterm-256color",
    }
    command = [sys.executable, "-m", "slideformer", "preview", str(yaml_for()), "--rows", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    out = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        out += piece
    process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    assert re.search(r"\x1b\[1;32m\d+<end>\x1b\[0m", out.decode())
    assert "⟦" not in out.decode()


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed(slideformer, yaml_for, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a\x1b[2Jb\u202ec"}) + "\n")
    done = slideformer("preview", yaml_for(dataset="rows.jsonl"))
    assert "a⟦\\x1b[2Jb\\u202ec<eos>⟧" in done.stdout
    assert "\x1b" not in done.stdout


def test_warnings_and_bad_input_are_told_as_in_training(slideformer, yaml_for, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "", "completion": "abc"}) + "\n")
    done = slideformer("preview", yaml_for(dataset="rows.jsonl"))
    assert "warning: rows.jsonl: no token left out of the loss, not even the prompt's: 1 row (1)" in done.stderr
    assert "rows.jsonl:1; no token left out of the loss, not even the prompt's\n" in done.stdout
    done = slideformer("preview", yaml_for(dataset="nowhere.jsonl"))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("the data file nowhere.jsonl does not exist")


def test_strict_ends_at_the_first_row_that_cannot_be_used(slideformer, yaml_for, tmp_path) -> None:
    rows = [{"text": "abc"}, {"text": " "}, {"text": 5}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = slideformer("preview", yaml_for(dataset="rows.jsonl"))
    assert "  left out, empty text: 1 row (2)\n  left out, content is not text: 1 row (3)\n" in done.stdout
    done = slideformer("preview", yaml_for(dataset="rows.jsonl"), "--strict")
    assert done.stderr.strip().endswith("rows.jsonl:2: empty text: text is empty (strict is true)")
    assert done.returncode == 2


def test_a_step_behind_the_last_is_told(slideformer, yaml_for) -> None:
    done = slideformer("preview", yaml_for(), "--step", "3")
    assert done.stdout.strip().endswith("there is no such step: the run has 2")


def test_no_weights_are_read(slideformer, yaml_for, tmp_path, toy) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (toy / "model").iterdir():
        if not path.name.endswith(".safetensors"):
            (bare / path.name).write_bytes(path.read_bytes())
    assert slideformer("preview", yaml_for(model_name_or_path=bare)).returncode == 0


def test_a_streamed_dataset_is_shown_without_being_read_to_its_end(slideformer, yaml_for, tmp_path) -> None:
    path = write_sums(tmp_path / "rows.jsonl", 300)
    with path.open("a") as file:
        file.write("{broken\n")
    settings = yaml_for(dataset="rows.jsonl", streaming=True, shuffle_buffer_size=4)
    shown = previewed(slideformer, settings, "--rows", 2)
    assert len(shown["rows"]) == 2
    assert shown["data"][0]["streamed"] and shown["data"][0]["rows_read"] < 300
