"""From local files of rows to micro-batches of token ids, with a count of everything that was left out."""

from slideformer.data.batches import Batches, MicroBatch, evaluation_batches
from slideformer.data.dataset import Dataset, evaluation_sets, load_dataset, training_batches
from slideformer.data.tokenizer import Codec, codec_of, load_tokenizer

__all__ = [
    "Batches",
    "Codec",
    "Dataset",
    "MicroBatch",
    "codec_of",
    "evaluation_batches",
    "evaluation_sets",
    "load_dataset",
    "load_tokenizer",
    "training_batches",
]
