"""Bytes on each tier: arenas on the host, the state, and the buffers that plans name."""

from slideformer.memory.budget import Budget, Limit, budget, size
from slideformer.memory.buffers import BatchShape, Cell, Held, Need, Tier, allocate, needs
from slideformer.memory.disk import DiskFault, DiskFile, DiskFolder, free_nbytes, padded
from slideformer.memory.disk_rates import DiskRates, disk_rates
from slideformer.memory.host import Arena
from slideformer.memory.machine import available_nbytes, host_limit, resident_nbytes
from slideformer.memory.state import Home, State, Twin, home_nbytes
from slideformer.memory.stored import StoredTile

__all__ = [
    "Arena",
    "BatchShape",
    "Budget",
    "Cell",
    "DiskFault",
    "DiskFile",
    "DiskFolder",
    "DiskRates",
    "Held",
    "Home",
    "Limit",
    "Need",
    "State",
    "StoredTile",
    "Tier",
    "Twin",
    "allocate",
    "available_nbytes",
    "budget",
    "disk_rates",
    "free_nbytes",
    "home_nbytes",
    "host_limit",
    "needs",
    "padded",
    "resident_nbytes",
    "size",
]
