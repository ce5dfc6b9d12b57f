"""Hub ids and saved datasets, without a network: the library's cache is filled by the library itself."""

from __future__ import annotations

import subprocess
import sys

import datasets
import pytest

from slideformer.config import DatasetSpec
from slideformer.data.dataset import load_dataset, training_batches
from slideformer.data.sources import open_source
from slideformer.errors import BadInput

ROWS = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(4)]
COLUMNS = {"prompt": "question", "completion": "answer"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder that `someone/sums` would come from; nothing else is there, and there is no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "cache" / "someone___sums" / "default" / "0.0.0" / "0123456789abcdef"
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "saved")
    folder.mkdir(parents=True)
    builder = datasets.load_dataset("json", data_files=str(_json(tmp_path)), cache_dir=str(tmp_path / "made"))["train"]
    arrow = builder.cache_files[0]["filename"]
    (folder / "sums-train.arrow").write_bytes(open(arrow, "rb").read())
    info = datasets.DatasetInfo(
        features=builder.features,
        builder_name="sums",
        dataset_name="sums",
        config_name="default",
        version="0.0.0",
        splits=datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=len(ROWS), dataset_name="sums")}),
    )
    info.write_to_directory(str(folder))
    return tmp_path


def _json(folder):
    path = folder / "sums.jsonl"
    datasets.Dataset.from_list(ROWS).to_json(path)
    return path


def test_a_hub_id_is_loaded_by_its_library_and_read_as_any_rows(hub, codec, make_config) -> None:
    spec = {"path": "someone/sums", "split": "train", "columns": COLUMNS}
    dataset = load_dataset(make_config(spec), codec)
    (report,) = dataset.reports
    assert (report.path, report.rows_read, report.rows_kept) == ("someone/sums", 4, 4)
    assert codec.tokenizer.decode(dataset.train[0].samples[3].input_ids) == "3+14<eos>"
    assert dataset.train[0].samples[3].where == "someone/sums:4"


def test_a_split_that_the_dataset_does_not_have_is_told(hub, codec, make_config) -> None:
    spec = {"path": "someone/sums", "split": "test", "columns": COLUMNS}
    with pytest.raises(BadInput, match="the dataset someone/sums .*cannot be loaded from the hub: .*test"):
        load_dataset(make_config(spec), codec)


def test_a_name_that_is_neither_file_nor_dataset_is_told(hub, codec, make_config) -> None:
    with pytest.raises(BadInput, match="the dataset nobody/nothing is no local file or folder, and cannot be loaded"):
        load_dataset(make_config("nobody/nothing"), codec)


def test_a_folder_that_the_library_saved_is_read(hub, codec, make_config) -> None:
    dataset = load_dataset(make_config({"path": str(hub / "saved"), "columns": COLUMNS}), codec)
    assert len(dataset.train[0].samples) == 4


def test_a_missing_file_is_no_hub_id() -> None:
    for path in ("data.jsonl", "data/rows.json.gz", "/somewhere/rows", "a/b/c"):
        assert open_source(DatasetSpec(path=path), text_field="text").hub is None
    for path in ("someone/sums", "imdb", "tatsu-lab/alpaca", "HuggingFaceH4/ultrachat_200k"):
        assert open_source(DatasetSpec(path=path), text_field="text").hub is not None


def test_the_library_is_imported_for_hub_ids_only() -> None:
    code = (
        "import sys\n"
        "import slideformer.data\n"
        "print(sorted({'datasets', 'pyarrow', 'pandas'} & sys.modules.keys()))\n"
        "sys.modules['datasets'] = None\n"
        "from slideformer.data.hub import HubDataset\n"
        "try:\n    next(HubDataset('a/b', None, 'train', False).rows())\n"
        "except Exception as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == (
        "a/b is no local file or folder; for a dataset of the hub: pip install 'slideformer[datasets]'"
    )
    assert done.stdout.splitlines()[0] == "[]"


def test_a_hub_id_is_streamed_by_its_library(hub, codec, make_config, monkeypatch) -> None:
    """The library reads a file in place of the network; all else is its own."""
    load = datasets.load_dataset
    asked = []

    def from_file(path, name, *, split, streaming):
        asked.append((path, name, split, streaming))
        return load("json", data_files=str(hub / "sums.jsonl"), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", from_file)
    spec = {"path": "someone/sums", "name": "easy", "columns": COLUMNS}
    config = make_config(spec, streaming=True, max_steps=8, shuffle_buffer_size=2, per_device_train_batch_size=2)
    batches = training_batches(load_dataset(config, codec), config, codec)
    seen = [row for step in range(4) for row in batches.step(step).rows]
    assert sorted(seen[:4]) == sorted(seen[4:]) == [f"someone/sums:{i}" for i in range(1, 5)]
    assert set(asked) == {("someone/sums", "easy", "train", True)}
