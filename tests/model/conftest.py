"""Makes `families` (one folder up) importable and pins torch to one thread: bit equality is for one order of sums."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)
