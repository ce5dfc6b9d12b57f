"""All the samples of a run, from the files that its config names, and what became of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slideformer.config import TrainConfig
from slideformer.data.batches import Batches, MicroBatch, Source, evaluation_batches, shuffled
from slideformer.data.encode import Sample, encode_row
from slideformer.data.formats import LAYOUTS, UnusableRow, read_rows
from slideformer.data.report import FileReport
from slideformer.data.tokenizer import Codec
from slideformer.errors import BadInput


@dataclass(frozen=True, slots=True)
class Dataset:
    """train: one Source a file, with its weight. evaluation: name -> samples. reports: one a file, in config order."""

    train: tuple[Source, ...]
    evaluation: Mapping[str, Sequence[Sample]]
    reports: tuple[FileReport, ...]


def load_dataset(config: TrainConfig, codec: Codec) -> Dataset:
    """Read and encode every file of the config.

    Raises BadInput: whatever `read_rows` and `encode_row` raise, a file of which no row can be used, and with
    `strict: true` the first row that cannot.
    """
    reports: list[FileReport] = []

    def load(path: str, role: str) -> list[Sample]:
        samples, report = _load_file(Path(path), role, codec, config)
        reports.append(report)
        return samples

    train = [Source(load(spec.path, "training"), spec.weight) for spec in config.dataset]
    evaluation = {
        name: load(path, f"evaluation ({name})" if name else "evaluation") for name, path in config.eval_dataset.items()
    }
    if config.val_size:
        train, held_out = _split(train, config)
        evaluation[""] = held_out
    return Dataset(tuple(train), evaluation, tuple(reports))


def training_batches(dataset: Dataset, config: TrainConfig, codec: Codec) -> Batches:
    """The steps of a run over the training samples."""
    return Batches(
        dataset.train,
        config.per_device_train_batch_size,
        config.gradient_accumulation_steps,
        config.data_seed or 0,
        codec.pad_id,
    )


def evaluation_sets(dataset: Dataset, config: TrainConfig, codec: Codec) -> dict[str, list[MicroBatch]]:
    """Name -> all the samples of an evaluation set, once."""
    return {
        name: evaluation_batches(samples, config.eval_batch_size, codec.pad_id)
        for name, samples in dataset.evaluation.items()
    }


def _load_file(path: Path, role: str, codec: Codec, config: TrainConfig) -> tuple[list[Sample], FileReport]:
    samples: list[Sample] = []
    report = FileReport(str(path), role)
    first_unusable = ""
    for row in read_rows(path):
        report.rows_read += 1
        try:
            for sample in encode_row(row, codec, config):
                samples.append(sample)
                report.count(sample, row.number)
            report.rows_kept += 1
        except UnusableRow as error:
            first_unusable = first_unusable or f"{row.where}: {error}"
            report.dropped.setdefault(error.reason, []).append(row.number)
            if config.strict:
                raise BadInput(f"{row.where}: {error} (strict is true)") from None
    if not samples:
        why = f"the first is {first_unusable}" if first_unusable else "it has none"
        raise BadInput(f"no row of {path} can be used, of {report.rows_read}: {why}; expected {LAYOUTS}")
    return samples, report


def _split(train: Sequence[Source], config: TrainConfig) -> tuple[list[Source], list[Sample]]:
    """Take val_size samples out of the training samples, the same ones for the same seed."""
    places = [(s, i) for s, source in enumerate(train) for i in range(len(source.samples))]
    wanted = config.val_size * len(places) if config.val_size < 1 else config.val_size
    count = max(round(wanted), 1)
    if count >= len(places):
        raise BadInput(f"val_size is {config.val_size:g}, but there are only {len(places)} training rows: give less")
    held_out = {places[i] for i in shuffled(len(places), config.data_seed, "val_size")[:count]}
    kept = [
        Source([sample for i, sample in enumerate(source.samples) if (s, i) not in held_out], source.weight)
        for s, source in enumerate(train)
    ]
    return kept, [train[s].samples[i] for s, i in sorted(held_out)]
