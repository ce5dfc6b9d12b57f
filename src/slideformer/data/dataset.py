"""All the samples of a run, from the datasets that its config names, and what became of every row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from slideformer import __version__
from slideformer.config import DatasetSpec, TrainConfig
from slideformer.data import cache
from slideformer.data.batches import Batches, EvaluationBatches, MicroBatch, Source, shuffled
from slideformer.data.encode import EncodingRules
from slideformer.data.formats import RowFormat
from slideformer.data.report import FileReport
from slideformer.data.samples import Sample, Samples, SampleWriter, lengths_of, token_runs
from slideformer.data.sources import Rows, RowSource, open_source
from slideformer.data.stream import Stream, StreamedBatches
from slideformer.data.tokenizer import Codec
from slideformer.data.workers import Encoder, encode_all
from slideformer.errors import BadInput

TRAINING = "training"  # the role of rows that are trained on, in reports
TELL_EVERY_S = 10.0
CACHE_FORMAT = 2  # to be raised when the same rows would become other samples
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Dataset:
    """train: one Source a dataset, with its weight; streams instead, when streaming. evaluation: name -> samples.

    reports: one a dataset, in config order.
    """

    train: tuple[Source, ...]
    evaluation: Mapping[str, Sequence[Sample]]
    reports: tuple[FileReport, ...]
    streams: tuple[Stream, ...] = ()


def load_dataset(config: TrainConfig, codec: Codec, tell: Tell | None = None) -> Dataset:
    """Read and encode every dataset of the config, or find it as it was encoded before.

    tell: hears every TELL_EVERY_S seconds how far it is.

    Raises BadInput: whatever the readers and `encode_row` raise, a dataset of which no row can be used, and with
    `strict: true` the first row that cannot.
    """
    reports: list[FileReport] = []

    def load(spec: DatasetSpec, role: str) -> Samples:
        samples, report = _load(spec, role, codec, config, tell)
        reports.append(report)
        return samples

    train, streams = [], []
    for spec in config.dataset:
        if config.streaming:
            streams.append(_open_stream(spec, codec, config))
            reports.append(streams[-1].report)
        else:
            train.append(Source(load(spec, TRAINING), spec.weight, spec.path))
    evaluation: dict[str, Sequence[Sample]] = {
        name: load(spec, f"evaluation ({name})" if name else "evaluation") for name, spec in config.eval_dataset.items()
    }
    if config.val_size:
        counts = [len(source.samples) for source in train]
        train, evaluation[""] = _split(train, config)
        for report, source, count in zip(_of_training(reports), train, counts, strict=True):
            report.held_out = count - len(source.samples)
    return Dataset(tuple(train), evaluation, tuple(reports), tuple(streams))


def training_batches(dataset: Dataset, config: TrainConfig, codec: Codec) -> Batches | StreamedBatches:
    """The steps of a run over the training samples. Reports then also say how they were packed."""
    seed, pack_length = config.data_seed or 0, config.max_length if config.packing else 0
    rows, micro_batches = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if dataset.streams:
        return StreamedBatches(
            dataset.streams,
            rows,
            micro_batches,
            seed,
            codec.pad_id,
            config.shuffle_buffer_size,
            config.max_steps,
            pack_length,
        )
    batches = Batches(dataset.train, rows, micro_batches, seed, codec.pad_id, pack_length)
    if pack_length:
        for report, source, num_packs in zip(
            _of_training(dataset.reports), dataset.train, batches.num_packs, strict=True
        ):
            report.num_packs = num_packs
            report.pack_share = sum(lengths_of(source.samples)) / (num_packs * pack_length)
    return batches


def _of_training(reports: Sequence[FileReport]) -> list[FileReport]:
    return [report for report in reports if report.role == TRAINING]


def evaluation_sets(dataset: Dataset, config: TrainConfig, codec: Codec) -> dict[str, Sequence[MicroBatch]]:
    """Name -> all the samples of an evaluation set, once."""
    pack_length = config.max_length if config.packing else 0
    return {
        name: EvaluationBatches(samples, config.eval_batch_size, codec.pad_id, pack_length)
        for name, samples in dataset.evaluation.items()
    }


def require_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Raise BadInput for a token that the model has no row for, as of a tokenizer that was added to."""
    for samples in (*(source.samples for source in dataset.train), *dataset.evaluation.values()):
        first = 0
        for ids, labels in token_runs(samples):
            if max(int(ids.max()), int(labels.max())) >= vocab_size:
                at = int(np.argmax(np.maximum(ids, labels) >= vocab_size))
                place = int(np.searchsorted(np.cumsum(lengths_of(samples)), first + at, side="right"))
                raise BadInput(
                    f"{samples[place].where} has token {max(ids[at], labels[at])}, and the model knows {vocab_size}: "
                    "use the tokenizer that the model was trained with, or a model whose embedding was made larger"
                )
            first += len(ids)


def longest_sample(dataset: Dataset) -> int:
    """Tokens; of streams nobody knows, and 0 without any sample."""
    every = (*(source.samples for source in dataset.train), *dataset.evaluation.values())
    return max((max(lengths_of(samples), default=0) for samples in every), default=0)


def samples_of(
    rows: Rows, name: str, role: str, codec: Codec, config: TrainConfig, tell: Tell | None = None
) -> tuple[Samples, FileReport]:
    """Rows that are given in Python, as those of a file. name: what messages call them ("train_dataset").

    Rows with input_ids need nothing of the codec. Raises BadInput as `load_dataset` does, and for rows without an end
    or that are no mappings.
    """
    if not isinstance(rows, Sized):
        raise BadInput(f"{name} is a {type(rows).__name__}, which has no length: give a list of rows, or a dataset")
    source = RowSource(name, RowFormat(text_field=config.dataset_text_field), config.max_samples, given=rows)
    encoder = Encoder(codec, source.row_format, EncodingRules.of(config), config.strict)
    return _encoded(source, encoder, FileReport(name, role), None, config, tell)


def _load(
    spec: DatasetSpec, role: str, codec: Codec, config: TrainConfig, tell: Tell | None
) -> tuple[Samples, FileReport]:
    source, encoder = _prepared(spec, codec, config, streaming=False)
    folder = cache.folder_of(config.dataset_cache_dir)
    return _encoded(source, encoder, _new_report(source, role), folder, config, tell)


def _encoded(
    source: RowSource,
    encoder: Encoder,
    report: FileReport,
    folder: Path | None,
    config: TrainConfig,
    tell: Tell | None,
) -> tuple[Samples, FileReport]:
    """Every sample of a source. folder: of the cache, if there is one."""

    def fill(writer: SampleWriter) -> cache.Facts:
        names: dict[str, int] = {}
        told = begun = time.monotonic()
        for chunk in encode_all(source.rows(), encoder, num_proc=config.dataset_num_proc or 1):
            report.add(chunk)
            if tell is not None and time.monotonic() - told >= TELL_EVERY_S:
                told = time.monotonic()
                tell(f"{source.name}: {report.rows_read:,} rows, {report.rows_read / (told - begun):,.0f} a second")
            if chunk.samples:
                files = [names.setdefault(name, len(names)) for name, _ in chunk.places]
                writer.add(names=np.array(files, np.int32), **chunk.arrays())
        if not report.samples:
            raise BadInput(report.nothing_usable())
        return {"files": list(names), "report": report.counts()}

    samples, facts = cache.cached(folder, _cache_name(source, encoder) if folder else None, fill)
    report.restore(facts["report"])
    return samples, report


def _open_stream(spec: DatasetSpec, codec: Codec, config: TrainConfig) -> Stream:
    """With its first rows read, so that what is wrong with all of them is known before anything else is loaded."""
    source, encoder = _prepared(spec, codec, config, streaming=True)
    stream = Stream(source, encoder, spec.weight, _new_report(source, TRAINING))
    stream.report.streamed = True
    next(stream.samples())
    return stream


def _prepared(spec: DatasetSpec, codec: Codec, config: TrainConfig, *, streaming: bool) -> tuple[RowSource, Encoder]:
    source = open_source(spec, text_field=config.dataset_text_field, max_rows=config.max_samples, streaming=streaming)
    return source, Encoder(codec, source.row_format, EncodingRules.of(config), config.strict)


def _new_report(source: RowSource, role: str) -> FileReport:
    report = FileReport(source.name, role, files=max(len(source.files), 1))
    report.passed_over = [str(path) for path in source.passed_over]
    return report


def _cache_name(source: RowSource, encoder: Encoder) -> str | None:
    """Of everything that decides what the samples are; None for rows that cannot be told from others."""
    content = source.identity()
    if content is None:
        return None
    libraries = {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
    return cache.digest(
        {
            "format": CACHE_FORMAT,
            "slideformer": __version__,
            **libraries,
            "rows": content,
            "max_rows": source.max_rows,
            "encoder": encoder.identity(),
            "date": str(date.today()) if encoder.codec.is_dated else None,
        }
    )


def _split(train: Sequence[Source], config: TrainConfig) -> tuple[list[Source], list[Sample]]:
    """Take val_size samples out of the training samples, the same ones for the same seed."""
    counts = [len(source.samples) for source in train]
    total = sum(counts)
    wanted = config.val_size * total if config.val_size < 1 else config.val_size
    count = max(round(wanted), 1)
    if count >= total:
        raise BadInput(f"val_size is {config.val_size:g}, but there are only {total} training rows: give less")
    held_out = sorted(shuffled(total, config.data_seed or 0, "val_size")[:count].tolist())
    kept, taken, first = [], [], 0
    for source, size in zip(train, counts, strict=True):
        here = [i - first for i in held_out if first <= i < first + size]
        out = set(here)
        rest = [i for i in range(size) if i not in out]
        taken += [source.samples[i] for i in here]
        kept.append(Source(source.samples.subset(rest), source.weight, source.name))
        first += size
    return kept, taken
