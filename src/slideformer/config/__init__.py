"""One frozen, validated record of a run, and every rule between its fields.

Names are those of Hugging Face TrainingArguments and TRL. Reading files and command lines, and what other tools call
these fields, is the command line's business. Standard library and pydantic only.
"""

from slideformer.config.data import COLUMNS, DatasetSpec, FormatName
from slideformer.config.disk import DiskSettings
from slideformer.config.generation import GenerationSettings
from slideformer.config.optimizer import FOLLOWS_A_METRIC, WITH_A_FLOOR, Schedule
from slideformer.config.output import TrackerName
from slideformer.config.train_config import TrainConfig
from slideformer.config.values import SIZE_UNITS

__all__ = [
    "COLUMNS",
    "DatasetSpec",
    "DiskSettings",
    "FOLLOWS_A_METRIC",
    "FormatName",
    "GenerationSettings",
    "SIZE_UNITS",
    "Schedule",
    "TrackerName",
    "TrainConfig",
    "WITH_A_FLOOR",
]
