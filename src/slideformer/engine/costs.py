"""What the ops of one model and batch take on a machine: seconds on a virtual clock, and device memory for a while.

From rates alone, for whoever has no machine at hand, or measured on the device (probe.py). Blocks are told apart, since
a model may have several kinds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from slideformer.kernels.linear_cross_entropy import CHUNK_TOKENS
from slideformer.layout import Layout, UnitKind
from slideformer.memory import BatchShape
from slideformer.memory.stored import DTYPES, plane_tiles
from slideformer.schedule import Op, OpKind, Place, Plan, joined_step_s
from slideformer.schedule.ops import DISK_LANES, STATE, LaneName

UPDATE_NBYTES = 26
"""Memory traffic of the update of a parameter with a bf16 gradient: it reads 14 bytes and writes 12."""

AHEAD, WEIGHTS_FIRST, REST_LATER = 1.1, 0.73, 1.03
"""What an update into a second copy takes, all of it, only its weights, or what that has left out, times one in place:
reading 14 bytes sets the pace of all of them, and stores past the caches are a little slower (6.1 Gparam/s in place,
5.5, 8.4 and 5.9; 16 threads, H200 machine, 2026-12-01)."""

COPIED_NBYTES = 6
"""Host memory traffic of a streamed parameter beside its update: two uploads and a landing gradient, 2 bytes each."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second, when it does nothing else."""

    flops: float  # of a training step's matrix products
    link_nbytes: float  # host to device, and as much back at the same time
    update_numel: float  # parameters through the optimizer
    host_nbytes: float  # copies within the host
    device_nbytes: float  # memory traffic of the device
    disk_nbytes: float = 1.75e9  # read and written at once, both counted (an H200 machine's disk, 2026-11-30)

    def known(
        self,
        *,
        flops: float | None,
        link_nbytes: float | None,
        update_numel: float | None,
        disk_nbytes: float | None = None,
    ) -> Rates:
        """The same with what was measured elsewhere in place of these (None: as it is)."""
        given = {
            "flops": flops,
            "link_nbytes": link_nbytes,
            "update_numel": update_numel,
            "disk_nbytes": disk_nbytes,
        }
        return replace(self, **{name: rate for name, rate in given.items() if rate})


# cuda: an H200 with 16 cores of Sapphire Rapids class, 2026-11-30 (bf16 training at batch 32 x 1024; page-locked copies
# both ways at once; AdamW on the split master). cpu: 2 cores of a virtual machine, fp32.
ASSUMED = {
    "cuda": Rates(flops=480e12, link_nbytes=50e9, update_numel=4.1e9, host_nbytes=40e9, device_nbytes=3.5e12),
    "cpu": Rates(flops=120e9, link_nbytes=5e9, update_numel=0.4e9, host_nbytes=5e9, device_nbytes=5e9),
}


HOST_LIBRARY_NBYTES = {"cuda": 1 << 30, "cpu": 0}
"""By kind of device, from an engine's beginning on: 0.66 to 0.96 GiB beside the plan's buffers in 23 runs of five
shapes, 1.21 to 1.60 in four whose state was all on the device (H200, torch 2.11, 2026-11-30)."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Of one block and one micro-batch. backward: with the second run of the block; the kept ones: without.

    workspace_nbytes: device memory that a backward takes beside the plan's buffers; the kept one: and beside what its
    kept graph holds from forward to backward, which is kept_nbytes.
    """

    forward_s: float
    backward_s: float
    kept_forward_s: float
    kept_backward_s: float
    workspace_nbytes: int
    kept_workspace_nbytes: int
    kept_nbytes: int

    def times(self, seconds: float, nbytes: float) -> BlockCost:
        """So many times as long, and so many times as large."""
        return BlockCost(
            seconds * self.forward_s,
            seconds * self.backward_s,
            seconds * self.kept_forward_s,
            seconds * self.kept_backward_s,
            int(nbytes * self.workspace_nbytes),
            int(nbytes * self.kept_workspace_nbytes),
            int(nbytes * self.kept_nbytes),
        )


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Of final norm, output projection and loss, one micro-batch. grads_s: with all gradients; loss_s: without.
    workspace_nbytes: device memory that they take beside the plan's buffers."""

    grads_s: float
    loss_s: float
    workspace_nbytes: int

    def times(self, seconds: float, nbytes: float) -> HeadCost:
        return HeadCost(seconds * self.grads_s, seconds * self.loss_s, int(nbytes * self.workspace_nbytes))


@dataclass(frozen=True, slots=True)
class Costs:
    """blocks: in the layout's order. head: with the output projection whole; None: it and its gradient have no room on
    the device. sliced_head: all slices together, their gradients (with the logits made again) and their sight apart.
    measured: on the device itself. library_nbytes: what matrix libraries keep there from a step's first products on;
    host_library_nbytes: what a device's libraries and compiled kernels take on the host. call_nbytes: what a
    micro-batch's blocks are called with besides hidden states (masks, rotary tables)."""

    rates: Rates
    blocks: tuple[BlockCost, ...]
    head: HeadCost | None
    sliced_head: HeadCost
    measured: bool
    library_nbytes: int = 0
    host_library_nbytes: int = 0
    call_nbytes: int = 0

    def of_share(self, share: float) -> Costs:
        """With memory for so many times the tokens of a micro-batch."""
        return replace(self._times(1.0, share), call_nbytes=int(share * self.call_nbytes))

    def times(self, num: int) -> Costs:
        """Of micro-batches that are so many times larger. Memory stays that of one."""
        return self._times(num, 1.0)

    def _times(self, seconds: float, nbytes: float) -> Costs:
        return replace(
            self,
            blocks=tuple(block.times(seconds, nbytes) for block in self.blocks),
            head=None if self.head is None else self.head.times(seconds, nbytes),
            sliced_head=self.sliced_head.times(seconds, nbytes),
        )

    @property
    def streamed_update_numel(self) -> float:
        """Parameters updated a second in a step, where copies share the host's memory with the update."""
        alone = self.rates.update_numel
        return alone * UPDATE_NBYTES / (UPDATE_NBYTES + COPIED_NBYTES) if self.measured else alone

    def head_of(self, *, sliced: bool) -> HeadCost:
        """A whole one that has no room counts as one in slices."""
        return self.sliced_head if sliced or self.head is None else self.head

    def blocks_workspace_nbytes(self, layout: Layout, *, keep: Collection[int], micro_batches: int) -> int:
        """Most that torch's allocator takes on the device for a block, beside all kept graphs together; less than
        nothing where that is when some of them are gone. keep: units whose graphs are kept; while a block runs backward
        those of the blocks above it are no more."""
        kept_nbytes, moments = 0, []
        for unit, block in zip(layout.blocks, self.blocks, strict=True):
            kept_nbytes += micro_batches * block.kept_nbytes if unit in keep else 0
            moments.append(kept_nbytes + (block.kept_workspace_nbytes if unit in keep else block.workspace_nbytes))
        return max(moments) - kept_nbytes


def assumed(layout: Layout, shape: BatchShape, rates: Rates, *, kind: str = "cpu") -> Costs:
    """From rates. kind: of the device. A matrix product is 2 operations per weight and token; attention's own products
    are left out, so long sequences take longer than this says. Memory is more than was seen, never less: a block that
    is run again keeps what its matrix products read and write, and their gradients; the head keeps a chunk of logits
    (Llama-3.2-3B shape, 32 x 1024, liger's kernels: 3.4 GiB seen on an H200 on 2026-11-30, 8.2 GiB here)."""
    tokens, itemsize = shape.micro_tokens, shape.dtype.itemsize
    blocks = []
    for unit in layout.blocks:
        forward_s = 2 * layout.units[unit].numel * tokens / rates.flops
        widths = sum(max(p.shape) for p in layout.units[unit].params if len(p.shape) > 1) + 16 * shape.hidden
        kept = itemsize * tokens * widths
        blocks.append(BlockCost(forward_s, 3 * forward_s, forward_s, 2 * forward_s, 3 * kept, 2 * kept, kept))
    vocabulary = layout.units[layout.output].params[0].shape[0]
    loss_s = 2 * vocabulary * shape.hidden * tokens / rates.flops
    per_logit = 2 * itemsize * min(CHUNK_TOKENS, tokens)
    slice_rows = layout.tiles(layout.output)[0].numel // shape.hidden
    norm = 16 * tokens * shape.hidden  # in fp32, with its gradients
    whole, sliced = (HeadCost(3 * loss_s, loss_s, max(per_logit * rows, norm)) for rows in (vocabulary, slice_rows))
    library_nbytes = HOST_LIBRARY_NBYTES[kind]
    return Costs(rates, tuple(blocks), whole, sliced, measured=False, host_library_nbytes=library_nbytes)


def cost_of(layout: Layout, shape: BatchShape, costs: Costs, *, clipped: bool = False) -> Callable[[Op], float]:
    """Seconds of each op for full batches of `shape`. clipped: by so much that updates ahead are given up at once; else
    they hold."""
    return _Clock(layout, shape, costs, clipped).seconds


def disk_traffic(plan: Plan, layout: Layout, shape: BatchShape) -> tuple[int, int]:
    """Bytes that a step reads from disk and writes to it."""
    moved = {True: 0, False: 0}
    for op in plan.ops:
        moved[op.lane in (LaneName.DISK_WRITE, LaneName.DISK_SPILL)] += _stored_nbytes(op, layout, shape)
    return moved[False], moved[True]


def _stored_nbytes(op: Op, layout: Layout, shape: BatchShape) -> int:
    """What an op reads from disk or writes to it."""
    if op.lane not in DISK_LANES:
        return 0
    found = 0
    for access in op.accesses:
        if access.buffer.place is Place.SAVED:
            found += shape.micro_tokens * shape.hidden * shape.dtype.itemsize
        elif access.buffer.place in STATE:
            content = str(access.buffer.place)
            tiles = plane_tiles(layout, op.unit, content, keep_residual=shape.dtype.itemsize == 4)
            found += tiles[op.tile].numel * DTYPES[content].itemsize if op.tile < len(tiles) else 0
    return found


def predicted_s(plan: Plan, layout: Layout, shape: BatchShape, costs: Costs, *, clipped: bool = False) -> float:
    """Of a step among others like it: by the virtual clock, and no faster than the disk, which all of its lanes share,
    moves what there is to move. clipped: see `cost_of`."""
    found = joined_step_s(plan, cost_of(layout, shape, costs, clipped=clipped))
    return max(found, sum(disk_traffic(plan, layout, shape)) / costs.rates.disk_nbytes)


class _Clock:
    def __init__(self, layout: Layout, shape: BatchShape, costs: Costs, clipped: bool) -> None:
        self.clipped = clipped
        self.layout, self.shape, self.costs, self.rates = layout, shape, costs, costs.rates
        self.micro_batches, self.itemsize = shape.micro_batches, shape.dtype.itemsize
        vocabulary = layout.units[0].params[0].shape[0]
        rows = min(vocabulary, shape.tokens)
        self.rows_nbytes = rows * shape.hidden * self.itemsize
        self.hidden_nbytes = shape.micro_tokens * shape.hidden * self.itemsize
        self.touched = rows / vocabulary  # of every tile of the table: rows lie anywhere
        self.of_block = dict(zip(layout.blocks, costs.blocks, strict=True))
        self.update_numel = costs.streamed_update_numel

    def seconds(self, op: Op) -> float:
        if op.lane in DISK_LANES:
            return self.stored_s(op)
        for clock in (self.moved_s, self.updated_s, self.model_s, self.device_s):
            seconds = clock(op)
            if seconds is not None:
                return seconds
        return 0.0

    def model_s(self, op: Op) -> float | None:
        """What the model itself runs."""
        match op.kind:
            case OpKind.FORWARD:
                return self.of_block[op.unit].forward_s
            case OpKind.FORWARD_KEEP:
                return self.of_block[op.unit].kept_forward_s
            case OpKind.BACKWARD:
                return self.of_block[op.unit].backward_s
            case OpKind.BACKWARD_KEPT:
                return self.of_block[op.unit].kept_backward_s
            case OpKind.HEAD:
                return self.costs.head_of(sliced=False).grads_s
            case OpKind.HEAD_LOSS:
                return self.costs.head_of(sliced=False).loss_s
            case OpKind.HEAD_SEE:
                return self.micro_batches * self.costs.sliced_head.loss_s / len(self.layout.tiles(op.unit))
            case OpKind.HEAD_GRADS:  # logits again, then both gradients
                return self.micro_batches * self.costs.sliced_head.grads_s / len(self.layout.tiles(op.unit))
        return None

    def device_s(self, op: Op) -> float | None:
        """What only moves the device's memory."""
        unit, rate = self.layout.units[op.unit], self.rates.device_nbytes
        match op.kind:
            case OpKind.EMBED | OpKind.EMBED_BACKWARD:
                return 3 * self.hidden_nbytes / rate
            case OpKind.REDUCE | OpKind.REDUCE_OUTPUT:  # read the sum, write the gradient, read it for its norm
                return unit.train_numel * (4 + 2 * self.itemsize) / rate
            case OpKind.REDUCE_SLICE:
                return self._tile_numel(op) * (4 + 2 * self.itemsize) / rate
            case OpKind.UPDATE_RESIDENT | OpKind.UPDATE_RESIDENT_TABLE:
                return unit.train_numel * UPDATE_NBYTES / rate
            case OpKind.PICK_ROWS | OpKind.REDUCE_ROWS:
                return 2 * self.rows_nbytes / rate
        return None

    def moved_s(self, op: Op) -> float | None:
        link = self.rates.link_nbytes
        match op.kind:
            case OpKind.UPLOAD:
                return self._tile_numel(op) * self.itemsize / link
            case OpKind.DOWNLOAD:
                return self._trained_numel(op) * self.itemsize / link
            case OpKind.SPILL | OpKind.FETCH:
                return self.hidden_nbytes / link
            case OpKind.UPLOAD_ROWS | OpKind.DOWNLOAD_ROWS:
                return self.rows_nbytes / link
            case OpKind.GATHER:
                return self.touched * self._tile_numel(op) * self.itemsize / self.rates.host_nbytes
        return None

    def updated_s(self, op: Op) -> float | None:
        match op.kind:
            case OpKind.UPDATE_AHEAD | OpKind.REST_AHEAD if self.clipped:
                return 0.0
            case OpKind.SETTLE | OpKind.COMPLETE | OpKind.COMPLETE_ROWS if not self.clipped:
                return 0.0
            case OpKind.SETTLE_OTHERS if self.clipped:
                return 0.0
            case OpKind.UPDATE | OpKind.UPDATE_TABLE:
                share = 1.0
            case OpKind.UPDATE_AHEAD:
                share = AHEAD
            case OpKind.SETTLE | OpKind.SETTLE_ROWS if self.clipped:
                share = WEIGHTS_FIRST
            case OpKind.COMPLETE | OpKind.COMPLETE_ROWS:
                share = REST_LATER
            case OpKind.UPDATE_REST:
                share = 1 - self.touched
            case OpKind.REST_AHEAD:
                share = AHEAD * (1 - self.touched)
            case OpKind.UPDATE_ROWS:
                share = self.touched
            case OpKind.SETTLE_ROWS:  # as if two batches' rows had nothing to do with each other
                share = self.touched * self.touched
            case OpKind.SETTLE_OTHERS:
                share = self.touched * (1 - self.touched)
            case _:
                return None
        return share * self._trained_numel(op) / self.update_numel

    def stored_s(self, op: Op) -> float:
        """Whatever the disk moves, also straight from or to the device, if nothing else moves there: the clock knows
        that its lanes share it."""
        return _stored_nbytes(op, self.layout, self.shape) / self.rates.disk_nbytes

    def _tile_numel(self, op: Op) -> int:
        return self.layout.tiles(op.unit)[op.tile].numel

    def _trained_numel(self, op: Op) -> int:
        return self.layout.tiles(op.unit, trained=True)[op.tile].numel


def largest_block_numel(layout: Layout) -> int:
    """Elements of a slot."""
    return max(unit.numel for unit in layout.units if unit.kind is UnitKind.BLOCK)
