"""Full-parameter fine-tuning of language models through a sliding window of layers."""

__version__ = "0.1.0"
