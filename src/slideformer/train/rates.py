"""How long an op takes on a machine of given rates: enough to draw a step's timeline before there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slideformer.layout import Layout, UnitKind
from slideformer.memory import BatchShape
from slideformer.schedule import Op, OpKind


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second, when it does nothing else."""

    flops: float  # of a training step's matrix products
    link_nbytes: float  # host to device, and as much back at the same time
    update_numel: float  # parameters through the optimizer
    host_nbytes: float  # copies within the host

    def scaled(self, *, flops: float | None, link_nbytes: float | None, update_numel: float | None) -> Rates:
        """The same with what was measured elsewhere in place of these (None: as it is)."""
        return Rates(
            flops or self.flops, link_nbytes or self.link_nbytes, update_numel or self.update_numel, self.host_nbytes
        )


# cuda: an H200 with 16 cores of Sapphire Rapids class, 2026-11-30 (bf16 training at batch 32 x 1024; page-locked copies
# both ways at once; AdamW on the split master). cpu: 2 cores of a virtual machine, fp32.
ASSUMED = {
    "cuda": Rates(flops=480e12, link_nbytes=50e9, update_numel=4.1e9, host_nbytes=40e9),
    "cpu": Rates(flops=120e9, link_nbytes=5e9, update_numel=0.4e9, host_nbytes=5e9),
}


def costs(layout: Layout, shape: BatchShape, vocab_size: int, rates: Rates) -> Callable[[Op], float]:
    """Seconds of each op for full batches of `shape`.

    A matrix product is 2 operations per weight and token. Attention's own products are left out, so long sequences take
    longer than this says. An update ahead is taken to hold.
    """
    tokens = shape.micro_tokens
    itemsize = shape.dtype.itemsize
    rows = min(vocab_size, shape.tokens)
    row_numel = rows * shape.hidden
    hidden_nbytes = tokens * shape.hidden * itemsize
    touched = rows / vocab_size  # of every tile of the table: rows lie anywhere
    head_flops = 2 * vocab_size * shape.hidden * tokens

    def cost_s(op: Op) -> float:
        match op.kind:
            case OpKind.FORWARD:
                return 2 * layout.units[op.unit].numel * tokens / rates.flops
            case OpKind.BACKWARD:  # the forward again, then two products for each of it
                return 6 * layout.units[op.unit].numel * tokens / rates.flops
            case OpKind.HEAD:
                return 3 * head_flops / rates.flops
            case OpKind.HEAD_LOSS:
                return head_flops / rates.flops
            case OpKind.UPLOAD:
                return _tile_numel(layout, op) * itemsize / rates.link_nbytes
            case OpKind.DOWNLOAD:
                return _trained_numel(layout, op) * itemsize / rates.link_nbytes
            case OpKind.SPILL | OpKind.FETCH:
                return hidden_nbytes / rates.link_nbytes
            case OpKind.UPLOAD_ROWS | OpKind.DOWNLOAD_ROWS:
                return row_numel * itemsize / rates.link_nbytes
            case OpKind.GATHER:
                return touched * _tile_numel(layout, op) * itemsize / rates.host_nbytes
            case OpKind.UPDATE | OpKind.UPDATE_AHEAD:
                return _trained_numel(layout, op) / rates.update_numel
            case OpKind.UPDATE_REST | OpKind.REST_AHEAD:
                return (1 - touched) * _trained_numel(layout, op) / rates.update_numel
            case OpKind.UPDATE_ROWS | OpKind.SETTLE_ROWS:
                return touched * _trained_numel(layout, op) / rates.update_numel
        return 0.0

    return cost_s


def _tile_numel(layout: Layout, op: Op) -> int:
    return layout.tiles(op.unit)[op.tile].numel


def _trained_numel(layout: Layout, op: Op) -> int:
    return layout.tiles(op.unit, trained=True)[op.tile].numel


def largest_block_numel(layout: Layout) -> int:
    """Elements of a slot."""
    return max(unit.numel for unit in layout.units if unit.kind is UnitKind.BLOCK)
