"""Bytes on each tier: arenas on the host, the state, and the buffers that plans name."""

from slideformer.memory.buffers import BatchShape, Cell, Need, Tier, allocate, needs
from slideformer.memory.host import Arena
from slideformer.memory.state import Moments, State

__all__ = ["Arena", "BatchShape", "Cell", "Moments", "Need", "State", "Tier", "allocate", "needs"]
