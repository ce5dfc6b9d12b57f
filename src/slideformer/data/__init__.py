"""From rows in files to micro-batches of token ids, with a count of everything that was left out."""

from slideformer.data.batches import Batches, EvaluationBatches, MicroBatch
from slideformer.data.dataset import (
    Dataset,
    evaluation_sets,
    load_dataset,
    longest_sample,
    require_vocabulary,
    samples_of,
    training_batches,
)
from slideformer.data.seen import SeenRow, seen_rows
from slideformer.data.sources import Rows
from slideformer.data.stream import StreamedBatches
from slideformer.data.tokenizer import Codec, codec_of, load_tokenizer, with_template

__all__ = [
    "Batches",
    "Codec",
    "Dataset",
    "EvaluationBatches",
    "MicroBatch",
    "Rows",
    "SeenRow",
    "StreamedBatches",
    "codec_of",
    "evaluation_sets",
    "load_dataset",
    "load_tokenizer",
    "longest_sample",
    "require_vocabulary",
    "samples_of",
    "seen_rows",
    "training_batches",
    "with_template",
]
