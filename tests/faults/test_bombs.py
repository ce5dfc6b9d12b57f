"""Files that are meant to hurt, or are merely broken, end in a sentence and a code, in little time and memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from faults.forks import Server

MEMORY = "resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))\n"
DEEP = "[" * 100_000 + "]" * 100_000
LAUGHS = "learning_rate:\n- &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

BAD_ROWS = {
    "nested 100,000 deep": '{"text": ' + DEEP + "}",
    "a number of 10,000 digits": '{"text": "abc", "n": ' + "7" * 10_000 + "}",
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "a NUL byte": b'{"text": "a\x00b"}',
    "cut off": '{"text": "abc',
    "a number alone": "17",
    "Infinity": '{"text": Infinity}',
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_is_no_row_is_told_with_its_line(server: Server, config, tmp_path, row) -> None:
    content = row if isinstance(row, bytes) else row.encode()
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a good one"}\n' + content + b"\n")
    folder = config(dataset="bad.jsonl", max_steps=1, strict=True)
    child = server.start(folder, "train", "train.yaml", before=MEMORY)
    assert child.wait() == 2, child.told()
    assert "bad.jsonl" in child.error
    assert len(child.error) < 1000


def test_lines_of_ten_megabytes_are_read_cut_and_trained_on(server: Server, config, tmp_path) -> None:
    long = "0123456789" * 10**6
    rows = [
        {"text": long[: 2**20]},  # a byte a token here: ten times as many take ten times as long
        {"text": "short"},
        {"text": "short", "unused": [long]},
        {"text": "a lone surrogate \ud800 in it"},
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = config(dataset="long.jsonl", max_steps=2, per_device_train_batch_size=1)
    child = server.start(folder, "train", "train.yaml", before=MEMORY)
    assert child.wait() == 0, child.told()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rate: " + DEEP, "nested"),
        (LAUGHS, "learning_rate: found [["),
        ("learning_rate: !!python/object/apply:os.system ['touch pwned']\n", "not valid YAML"),
        ("learning_rate: " + "9" * 10_000, "not valid YAML: Exceeds the limit"),
        ("learning_rate: .nan", "learning_rate"),
        ("max_steps: 1e400", "max_steps"),
        ('output_dir: "a\\0b"', "output_dir"),
        ("# \x00", "unacceptable character"),
    ],
    ids=["deep", "laughs", "python", "digits", "nan", "infinite", "NUL in a path", "NUL"],
)
def test_a_config_that_is_meant_to_hurt_is_refused(server: Server, config, text, expected) -> None:
    folder = config()
    path = folder / "train.yaml"
    kept = [line for line in path.read_text().splitlines() if line.split(":")[0] not in text]
    path.write_text("\n".join([*kept, text]))
    child = server.start(folder, "train", "train.yaml", before=MEMORY)
    assert child.wait() == 2, child.told()[-2000:]
    assert expected in child.error
    assert len(child.error) < 2000
    assert not (folder / "pwned").exists()


def header_of(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 4),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        lambda path: header_of(path, DEEP.encode()),
        lambda path: header_of(path, b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}' + b"0000"),
        lambda path: path.write_bytes(bytes(reversed(path.read_bytes()))),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.symlink_to("model.safetensors")),
    ],
    ids=["half", "four bytes", "empty", "a long header", "deep", "lies", "reversed", "a folder", "endless", "itself"],
)
def test_weights_that_cannot_be_read_are_refused_by_name(server: Server, config, toy, tmp_path, harm) -> None:
    shutil.copytree(toy[0], tmp_path / "model")
    harm(tmp_path / "model/model.safetensors")
    folder = config(model_name_or_path="model")
    child = server.start(folder, "train", "train.yaml", before=MEMORY)
    assert child.wait() == 2, child.told()
    assert "model" in child.error and len(child.error) < 1000


def test_weights_that_nobody_may_read_are_refused_by_name(server: Server, config, toy, tmp_path) -> None:
    shutil.copytree(toy[0], tmp_path / "model")
    (tmp_path / "model/model.safetensors").chmod(0)
    folder = config(model_name_or_path="model")
    child = server.start(folder, "train", "train.yaml", before="obey_permissions()")
    assert child.wait() == 2, child.told()
    assert "model.safetensors" in child.error and "Permission denied" in child.error


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [DEEP, "{", "[]", '{"eos_token_id": {"a": []}, "model_type": 7}'], ids=str.__len__)
def test_a_model_folders_json_that_is_broken_is_told(server: Server, config, toy, tmp_path, name, content) -> None:
    shutil.copytree(toy[0], tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    folder = config(model_name_or_path="model", max_steps=1)
    child = server.start(folder, "train", "train.yaml", before=MEMORY)
    code = child.wait()
    assert "Traceback" not in child.told(), child.told()
    assert code == 2 or (code == 0 and name != "config.json"), child.told()
