"""From local files of rows to micro-batches of token ids, with a count of everything that was left out."""

from slideformer.data.batches import Batches, MicroBatch, evaluation_batches
from slideformer.data.dataset import Dataset, load_dataset
from slideformer.data.tokenizer import Codec, load_tokenizer

__all__ = ["Batches", "Codec", "Dataset", "MicroBatch", "evaluation_batches", "load_dataset", "load_tokenizer"]
