"""Whatever is in a file or on a command line: it is understood, or refused with a sentence; nothing else happens."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from data.byte_tokenizer import make_codec
from slideformer.cli.config_file import load_config
from slideformer.cli.names import ALIASES
from slideformer.config import TrainConfig
from slideformer.data.encode import EncodingRules, encode_row
from slideformer.data.files import read_file
from slideformer.data.formats import RowFormat
from slideformer.data.rows import UnusableRow
from slideformer.errors import BadInput
from slideformer.model import tensorfile
from slideformer.train.checkpoint import Damaged, open_checkpoint
from slideformer.train.metrics import lines_until
from slideformer.train.redact import redacted

FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


# configs

KEYS = st.sampled_from([*TrainConfig.model_fields, *ALIASES, "nonsense", "lerning_rate", ""])
VALUES = JSON | st.sampled_from(
    ["auto", "no", "1e-5", "1e400", "-1", "nan", "24GiB", "[", "{a", "a\0b", "\ud800", "x" * 999]
)


def is_refused(error: BadInput) -> bool:
    text = str(error)
    return 0 < len(text) < 5000


@FAST
@given(st.lists(st.tuples(KEYS, VALUES), max_size=5))
def test_a_config_file_gives_a_config_or_a_sentence(tmp_path, pairs) -> None:
    path = tmp_path / "c.yaml"
    text = yaml.safe_dump({"model_name_or_path": "m", "dataset": "d", **dict(pairs)}, allow_unicode=False)
    path.write_text(text)
    try:
        assert isinstance(load_config(path).config, TrainConfig)
    except BadInput as error:
        assert is_refused(error)


@FAST
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_as_a_config_file_give_a_sentence(tmp_path, content) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_config(path)
    assert is_refused(caught.value)


@FAST
@given(st.lists(st.text(max_size=30) | KEYS.map(lambda key: f"--{key}") | KEYS.map(lambda key: f"{key}=1"), max_size=5))
def test_any_words_on_the_command_line_give_a_config_or_a_sentence(words) -> None:
    try:
        load_config(None, ["model=m", "dataset=d", *words])
    except BadInput as error:
        assert is_refused(error)


# rows

COLUMNS = st.sampled_from(
    [
        "messages",
        "conversations",
        "prompt",
        "completion",
        "text",
        "instruction",
        "input",
        "output",
        "input_ids",
        "labels",
    ]
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "bot"]) | JSON,
        "content": st.text(max_size=9) | JSON,
        "from": st.sampled_from(["human", "gpt"]) | JSON,
        "value": st.text(max_size=9),
        "tool_calls": JSON,
    },
)
CELL = JSON | st.lists(MESSAGE, max_size=4) | st.text(max_size=20) | st.lists(st.integers(-5, 300), max_size=5)
CODEC = make_codec()
RULES = EncodingRules(32, "truncate", True, True)


@FAST
@given(st.dictionaries(COLUMNS, CELL, max_size=4))
def test_a_row_gives_samples_or_the_reason_why_not(tmp_path, columns) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    try:
        for row in read_file(path):
            for sample in encode_row(row, RowFormat(), CODEC, RULES):
                assert 0 < len(sample.input_ids) == len(sample.labels) <= 32
                given = columns.get("labels", []) if "input_ids" in columns else []  # which may be any tokens
                assert set(sample.labels[sample.labels != -100]) <= {*sample.input_ids, *given}
                assert sample.input_ids.min() >= 0
    except (UnusableRow, BadInput) as error:
        assert str(error)


@FAST
@given(
    st.binary(max_size=80), st.sampled_from(["r.jsonl", "r.json", "r.csv", "r.tsv", "r.txt", "r.jsonl.gz", "r.parquet"])
)
def test_any_bytes_as_a_data_file_give_rows_or_a_sentence(tmp_path, content, name) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    try:
        for row in read_file(path):
            assert row.number >= 1
    except BadInput as error:
        assert is_refused(error)


# safetensors and checkpoints


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


def check_header(path: Path) -> None:
    """What is accepted can be read to its end, piece by piece."""
    try:
        entries = tensorfile.read_header(path)
    except BadInput as error:
        assert is_refused(error)
        return
    size = path.stat().st_size
    for entry in entries.values():
        assert 8 <= entry.start and entry.start + entry.nbytes <= size
        if entry.dtype in tensorfile.DTYPES:
            numel = sum(piece.numel() for piece in tensorfile.pieces(entry, 3, torch.empty(24, dtype=torch.uint8)))
            assert numel * tensorfile.DTYPES[entry.dtype].itemsize == entry.nbytes


@FAST
@given(st.data())
def test_a_safetensors_file_with_bytes_changed_is_read_or_refused(tmp_path, sound, data) -> None:
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    check_header(path)


OFFSET = st.integers(-9, 60) | st.integers()
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I16", "F8_E4M3", "nonsense"]) | JSON,
        "shape": st.lists(st.integers(-1, 5) | st.integers(), max_size=3) | JSON,
        "data_offsets": st.lists(OFFSET, min_size=2, max_size=2) | JSON,
        "more": JSON,
    },
)


@FAST
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRY | JSON, max_size=3), st.binary(max_size=48)
)
def test_any_header_is_read_or_refused(tmp_path, header, content) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    check_header(path)


FILE_NAMES = st.sampled_from(
    ["trainer.json", "..", ".", "/etc/passwd", "../manifest.json", "a\0b", "", "manifest.json"]
)
SUM = st.fixed_dictionaries({"nbytes": st.integers(), "crc32": st.integers()}) | JSON


@FAST
@given(
    st.fixed_dictionaries({"step": st.integers() | JSON, "files": st.dictionaries(FILE_NAMES, SUM, max_size=4)}) | JSON,
    JSON,
)
def test_a_checkpoint_of_any_json_is_damaged_and_names_no_file_elsewhere(tmp_path, manifest, trainer) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "trainer.json").write_text(json.dumps(trainer))
    with pytest.raises(Damaged):
        open_checkpoint(tmp_path)


@FAST
@given(st.lists(JSON.map(json.dumps) | st.text(max_size=20), max_size=6))
def test_metrics_of_any_lines_are_kept_or_left_out(tmp_path, lines) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    for line in lines_until(path, 5, evaluated=True).splitlines():
        assert json.loads(line)["global_step"] <= 5


@FAST
@given(JSON)
def test_redacting_keeps_the_shape_of_any_value(value) -> None:
    found = redacted(value)
    assert type(found) is type(value)
    if isinstance(value, (list, dict)):
        assert len(found) == len(value)
