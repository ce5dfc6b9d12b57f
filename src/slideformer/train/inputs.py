"""What a run is made of, whatever form it was given in: a folder or a module, files or rows, a tokenizer or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slideformer.config import TrainConfig
from slideformer.data import (
    Codec,
    Dataset,
    Rows,
    codec_of,
    load_dataset,
    longest_sample,
    require_vocabulary,
    samples_of,
    with_template,
)
from slideformer.data.batches import Source
from slideformer.data.tokenizer import PreTrainedTokenizerBase
from slideformer.engine import Engine
from slideformer.errors import BadInput
from slideformer.model import weights
from slideformer.model.decoder import Decoder
from slideformer.model.folder import read_config
from slideformer.train.setup import build_decoder, device_kind

GIVEN_AS_ROWS = "(rows given in Python)"
Model = str | Path | torch.nn.Module
Data = str | Path | Rows | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """config: with what was given in its fields' place. module: None when the model is a folder's. train, evaluation:
    rows, where they are not files'. tokenizer: None when it is the folder's."""

    config: TrainConfig
    module: torch.nn.Module | None
    train: Rows | None
    evaluation: Mapping[str, Rows]
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def folder(self) -> Path | None:
        return None if self.module is not None else Path(self.config.model_name_or_path)

    @property
    def model_config(self) -> object:
        """The Hugging Face config. Raises BadInput as `read_config` does."""
        if self.module is not None:
            return self.module.config
        return read_config(Path(self.config.model_name_or_path))

    def codec(self) -> Codec:
        """Raises BadInput as `load_tokenizer` does, and when there is none."""
        if self.tokenizer is None:
            if self.module is not None:
                raise BadInput("the model is a module, so its tokenizer is not known: give it as processing_class")
            return codec_of(self.config)
        name = getattr(self.tokenizer, "name_or_path", "") or "processing_class"
        if not getattr(self.tokenizer, "is_fast", False):
            raise BadInput(f"processing_class is a {type(self.tokenizer).__name__}; a fast tokenizer is needed")
        ends = [self.tokenizer.eos_token_id]
        generation = getattr(self.module, "generation_config", None)
        named = getattr(generation, "eos_token_id", None)
        ends += named if isinstance(named, list) else [named]
        if self.folder is not None:
            ends += codec_of(self.config).end_ids
        codec = Codec(self.tokenizer, name, tuple(dict.fromkeys(token for token in ends if token is not None)))
        return with_template(codec, self.config)

    def dataset(self, codec: Codec, tell: Callable[[str], None]) -> Dataset:
        """All samples, from files and from rows. tell: hears how far it is. Raises BadInput."""
        files = {name: path for name, path in self.config.eval_dataset.items() if name not in self.evaluation}
        sources = self.config.dataset if self.train is None else ()
        read = load_dataset(self.config.model_copy(update={"dataset": sources, "eval_dataset": files}), codec, tell)
        train, evaluation, reports = read.train, dict(read.evaluation), read.reports
        if self.train is not None:
            samples, report = samples_of(self.train, "train_dataset", "training", codec, self.config, tell)
            train, reports = (Source(samples),), (*reports, report)
        for name, rows in self.evaluation.items():
            label = f"eval_dataset[{name!r}]" if name else "eval_dataset"
            evaluation[name], report = samples_of(rows, label, "evaluation", codec, self.config, tell)
            reports = (*reports, report)
        return Dataset(tuple(train), evaluation, tuple(reports), () if self.train is not None else read.streams)

    def check_rows(self, dataset: Dataset, warn: Callable[[str], None]) -> None:
        """Raise BadInput for a token that the model has no row for, and for a row longer than its position table; warn
        of one longer than the model was made for, where positions are computed. Of streams nobody knows yet."""
        text = self.model_config.get_text_config()
        require_vocabulary(dataset, text.vocab_size)
        longest, most = longest_sample(dataset), getattr(text, "max_position_embeddings", None)
        if most is None or longest <= most:
            return
        kind = device_kind(self.config)
        table = build_decoder(self.config, kind, torch.device("cpu"), self.model_config).num_positions
        if table is not None:
            raise BadInput(
                f"the longest row has {longest:,} tokens, and the model's position table has {table:,}: "
                "lower max_length"
            )
        warn(
            f"the longest row has {longest:,} tokens, and the model was made for {most:,} positions: what comes after "
            "them means little to it; lower max_length, or use a config.json that scales its rope"
        )

    def check_weights(self, decoder: Decoder) -> None:
        """Raise BadInput for weights that are missing or do not fit, before anything is allocated."""
        if self.folder is not None:
            weights.check(self.folder, decoder.layout, names=decoder.names, allow_pickle=self.config.allow_pickle)
            return
        given = _parameters(self.module)
        for unit in decoder.layout.units:
            for param in unit.params:
                if param.name not in given or tuple(given[param.name].shape) != tuple(param.shape):
                    raise BadInput(f"the module has no parameter {param.name} of shape {list(param.shape)}")

    def load(self, engine: Engine) -> None:
        """Set the engine's weights. Raises BadInput for values that are not finite."""
        if self.folder is not None:
            names, allow_pickle = engine.decoder.names, self.config.allow_pickle
            weights.load(self.folder, engine.layout, engine.write, names=names, allow_pickle=allow_pickle)
            return
        for unit, offset, flat in _places(engine, self.module):
            for start in range(0, len(flat), engine.layout.tile_numel):
                values = flat[start : start + engine.layout.tile_numel].float().cpu()
                if not values.isfinite().all():
                    raise BadInput("the module holds weights that are not finite: use another one")
                engine.write(unit, offset + start, values)

    def give_back(self, engine: Engine) -> None:
        """Copy the trained weights into the module that was given."""
        if self.module is None:
            return
        for unit, offset, flat in _places(engine, self.module):
            for start in range(0, len(flat), engine.layout.tile_numel):
                piece = flat[start : start + engine.layout.tile_numel]
                piece.copy_(engine.read(unit, offset + start, offset + start + len(piece)))


def inputs_of(
    model: Model | None,
    args: TrainConfig,
    train_dataset: Data,
    eval_dataset: Data | Mapping[str, Data],
    processing_class: PreTrainedTokenizerBase | None,
) -> Inputs:
    """Sort what a Trainer was given; what was given beside args wins. Raises BadInput: no config, no model, no rows."""
    if not isinstance(args, TrainConfig):
        kind = type(args).__name__
        raise BadInput(f"args is of type {kind}, must be a TrainConfig: give TrainConfig(output_dir=..., ...)")
    changes: dict[str, object] = {}
    module = model if isinstance(model, torch.nn.Module) else None
    if module is not None:
        changes["model_name_or_path"] = ""
    elif model is not None:
        changes["model_name_or_path"] = str(model)
    elif not args.model_name_or_path:
        raise BadInput("there is no model: give a folder or a module, or model_name_or_path in args")
    rows = None
    if isinstance(train_dataset, (str, Path)):
        changes["dataset"] = str(train_dataset)
    elif train_dataset is not None:
        rows, changes["dataset"] = train_dataset, GIVEN_AS_ROWS
    elif not args.dataset:
        raise BadInput("there is nothing to train on: give train_dataset, or dataset in args")
    if rows is not None and args.val_size:
        raise BadInput("val_size takes rows out of files: give eval_dataset beside train_dataset")
    evaluation: dict[str, Rows] = {}
    if eval_dataset is not None:
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        files = {name: str(data) for name, data in named.items() if isinstance(data, (str, Path))}
        evaluation = {name: data for name, data in named.items() if name not in files}
        changes["eval_dataset"] = {**files, **dict.fromkeys(evaluation, GIVEN_AS_ROWS)}
    return Inputs(_with(args, changes), module, rows, evaluation, processing_class)


def _with(args: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """The config with these fields, checked again. Raises BadInput."""
    given = {name: value for name, value in args.model_dump(mode="json").items() if name in args.model_fields_set}
    if given.get("metric_for_best_model") == "eval_loss":  # as by default, which the evaluation sets decide
        del given["metric_for_best_model"]
    return TrainConfig.model_validate({**given, **changes})


def _parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def _places(engine: Engine, module: torch.nn.Module) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(unit, offset, the flat values of a parameter, sharing memory) of everything in the layout."""
    given = _parameters(module)
    for index, unit in enumerate(engine.layout.units):
        for param in unit.params:
            yield index, unit.offsets[param.name], given[param.name].detach().view(-1)
