"""The vocabulary of a plan: lanes, buffers, accesses, ops.

An op is one action in one lane. It names every buffer that it touches, what it needs to find there and what it leaves
there. Everything else (waits, proof, timeline, which tensors an action may reach) follows from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class LaneName(StrEnum):
    """The FIFO lanes of a step. All of them run at once; within one, ops run in program order."""

    COMPUTE = "compute"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    SPILL = "spill"
    FETCH = "fetch"
    UPDATE = "update"
    GATHER = "gather"
    DISK_READ = "disk_read"  # state for updates
    DISK_WRITE = "disk_write"  # and back
    DISK_FEED = "disk_feed"  # weights for uploads and gathers, or uploads straight from files
    DISK_SPILL = "disk_spill"  # saved inputs
    DISK_FETCH = "disk_fetch"


DISK_LANES = frozenset(
    {LaneName.DISK_READ, LaneName.DISK_WRITE, LaneName.DISK_FEED, LaneName.DISK_SPILL, LaneName.DISK_FETCH}
)
"""Lanes between files and memory: the host's, page-locked, or with GPUDirect Storage the device's. Reads have lanes of
their own, so that none of them waits behind one whose place is not free yet."""

HOST_LANES = frozenset({LaneName.UPDATE, LaneName.GATHER}) | DISK_LANES
"""Lanes whose work is done by host threads; the others launch work on the device."""


class OpKind(StrEnum):
    LOAD = "load"  # token ids, labels and the batch's row numbers to the device
    GATHER = "gather"  # rows of the table that the batch needs, into page-locked memory
    PICK_ROWS = "pick_rows"  # rows of a resident table
    UPLOAD_ROWS = "upload_rows"
    UPLOAD = "upload"  # one tile of a unit's weights into its slot
    EMBED = "embed"
    FORWARD = "forward"
    FORWARD_KEEP = "forward_keep"  # keeps what backward needs, so that nothing is run again
    SPILL = "spill"  # a saved input or hidden gradient to the host
    FETCH = "fetch"  # and back
    HEAD = "head"  # final norm, output projection, loss and all their gradients
    HEAD_LOSS = "head_loss"  # the loss alone, for evaluation
    HEAD_OPEN = "head_open"  # sliced head: a micro-batch's positions with a target, through the final norm
    HEAD_SEE = "head_see"  # one tile of the projection into every micro-batch's sums
    HEAD_TOTAL = "head_total"  # the loss
    HEAD_GRADS = "head_grads"  # one tile's gradient, and its share of the hidden ones
    HEAD_CLOSE = "head_close"  # a micro-batch's hidden gradient, back through the final norm
    BACKWARD = "backward"  # runs the block again, from its saved input
    BACKWARD_KEPT = "backward_kept"
    EMBED_BACKWARD = "embed_backward"
    REDUCE = "reduce"  # sum -> gradient in its final precision, and its norms
    REDUCE_OUTPUT = "reduce_output"  # the same for the output projection, row by row
    REDUCE_SLICE = "reduce_slice"  # the same for one tile of it
    NORM_OUTPUT = "norm_output"  # the whole of it, from the norms of its rows
    REDUCE_ROWS = "reduce_rows"  # the same for the touched rows of the table
    REPORT = "report"  # norms of one unit to the host
    REPORT_LOSS = "report_loss"
    DOWNLOAD = "download"  # one tile of a unit's gradient
    DOWNLOAD_ROWS = "download_rows"
    GUARD = "guard"  # eager: is the loss finite?
    DECIDE = "decide"  # deferred: global norm, clip factor, skip or go
    TOTAL = "total"  # eager: global norm, for the record
    RESULT = "result"  # evaluation: loss to the caller
    UPDATE = "update"
    UPDATE_TABLE = "update_table"  # deferred: all rows of one tile of the table
    UPDATE_REST = "update_rest"  # eager: those that the batch did not touch
    UPDATE_ROWS = "update_rows"  # and the touched ones
    UPDATE_AHEAD = "update_ahead"  # deferred: as if nothing were clipped, into the spare copy of the tile's state
    REST_AHEAD = "rest_ahead"  # the same for the untouched rows of a tile of the table
    UPDATE_RESIDENT = "update_resident"  # all of a resident unit, on the device
    UPDATE_RESIDENT_TABLE = "update_resident_table"  # the same for the table, touched rows included
    SETTLE = "settle"  # the spare copy becomes the state, once it has the weights that the verdict asks for
    SETTLE_ROWS = "settle_rows"  # the same for a tile of the table, or at first for the rows that the next batch reads
    SETTLE_OTHERS = "settle_others"  # and for its other rows
    COMPLETE = "complete"  # of a settled tile, what nobody reads before its next update, unless it is there already
    COMPLETE_ROWS = "complete_rows"  # the same for a tile of the table
    READ_STATE = "read_state"  # one tile, as far as it is on disk, for its update
    WRITE_STATE = "write_state"  # and back
    READ_ROWS = "read_rows"  # the same for the second of the two updates of a tile of the table
    WRITE_ROWS = "write_rows"
    READ_WEIGHTS = "read_weights"  # one tile, for its upload or a gather
    WRITE_SAVED = "write_saved"  # a saved input or hidden gradient to disk
    READ_SAVED = "read_saved"  # and back
    # generation
    NEXT = "next"  # what this pass works on: the prompts, or the tokens that the pass before has chosen
    EMBED_CACHED = "embed_cached"
    FETCH_CACHE = "fetch_cache"  # keys and values of one block and micro-batch from the host
    FORWARD_CACHED = "forward_cached"  # one block, which appends its keys and values to those that it finds
    SPILL_CACHE = "spill_cache"  # the new ones to the host
    HEAD_LAST = "head_last"  # the last position of each row, through the final norm
    HEAD_LOGITS = "head_logits"  # logits of one tile of the projection, or of all of it (tile -1)
    HEAD_PICK = "head_pick"  # the next token of each row
    REPORT_TOKENS = "report_tokens"  # tokens of one micro-batch to the host
    TAKE = "take"  # tokens onto the ends of their sequences


class Place(StrEnum):
    """The kinds of buffer. `Buffer.index` tells them apart within a kind."""

    # host or disk, per (unit, tile): the state
    WEIGHT = "weight"
    RESIDUAL = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    # host, other
    SPARE = "spare"  # (unit, tile): a second copy of all of a tile's state
    OTHER_ROWS = "other_rows"  # (unit, tile): of a tile of the table, weights that the next batch's rows do not have
    ROWS_HOST = "rows_host"
    RING = "ring"  # (position): gradient tiles on their way to an eager update
    GRAD_HOST = "grad_host"  # (unit, tile): gradients in waiting, deferred
    ROW_GRAD_HOST = "row_grad_host"
    SAVED = "saved"  # (position): spilled saved inputs and hidden gradients; on the host, and then on disk
    STAGED_STATE = "staged_state"  # (content, position): tiles between disk and an update
    STAGED_WEIGHTS = "staged_weights"  # (content, position): tiles between disk and an upload or gather
    STAGED_SAVED = "staged_saved"  # (0 out or 1 in, position)
    NORM_HOST = "norm_host"  # (unit, part)
    LOSS_HOST = "loss_host"
    VERDICT = "verdict"
    SEQUENCES = "sequences"  # generation: every prompt, and what it has come to
    FEED = "feed"  # what a pass works on, laid out to be loaded
    TOKENS_HOST = "tokens_host"  # (micro-batch): tokens that a pass has chosen
    CACHE_HOST = "cache_host"  # (unit, micro-batch): keys and values without room on the device
    # device
    BATCH = "batch"
    ROWS = "rows"
    HOME = "home"  # (unit): all of a resident unit's state
    SLOT = "slot"  # (position): weights of one block
    DENSE = "dense"  # (unit): weights of a unit with a slot of its own: glue, final, output
    SLICE = "slice"  # (position): one tile of the output projection
    SLICE_SUM = "slice_sum"  # its gradient, summed in fp32
    SLICE_GRAD = "slice_grad"  # (position): its gradient, as it is downloaded
    ROW_NORM = "row_norm"  # norms of the projection's gradient, row by row
    HEAD_STATE = "head_state"  # (micro-batch): sums of a sliced head; last positions and logits in generation
    CACHE = "cache"  # (unit, micro-batch): keys and values that stay on the device
    CACHE_RING = "cache_ring"  # (position): those of a block and micro-batch whose place is the host
    TOKENS = "tokens"  # (micro-batch)
    HIDDEN = "hidden"  # (position): one hidden state [batch, length, hidden]
    CALL = "call"  # (micro-batch): what the glue hands to every block
    GRAD = "grad"  # (position): gradient of one block, as it is downloaded
    GRAPH = "graph"  # (unit, micro-batch): what a block that is not run again keeps for backward
    GRAD_SUM = "grad_sum"  # (): fp32 sum over micro-batches of the block in hand
    DENSE_GRAD = "dense_grad"  # (unit): also of a resident block whose gradient waits for the verdict
    DENSE_SUM = "dense_sum"  # (unit)
    ROW_GRAD = "row_grad"
    ROW_SUM = "row_sum"
    NORM = "norm"  # (unit, part)
    LOSS = "loss"


STATE = (Place.WEIGHT, Place.RESIDUAL, Place.EXP_AVG, Place.EXP_AVG_SQ)
STATE_PLACES = frozenset(STATE)
FILED = STATE_PLACES | {Place.SAVED}
"""What may lie in files."""

STAGING = frozenset({Place.STAGED_STATE, Place.STAGED_WEIGHTS, Place.STAGED_SAVED})
"""Page-locked memory between disk and everybody else. Its first index says which ring of the place."""


class Buffer(NamedTuple):
    place: Place
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}[{','.join(map(str, self.index))}]" if self.index else str(self.place)


Content = tuple[str | int, ...]


class Access(NamedTuple):
    """One buffer that an op touches. needs: what it must find there (None: it overwrites); leaves: what it leaves
    there (None: it only reads). role: the name under which the action reaches it."""

    role: str
    buffer: Buffer
    needs: Content | None
    leaves: Content | None


@dataclass(frozen=True, slots=True)
class Op:
    """One action in one lane. unit, tile and micro are -1 where they do not apply."""

    kind: OpKind
    lane: LaneName
    accesses: tuple[Access, ...]
    unit: int = -1
    tile: int = -1
    micro: int = -1

    def __str__(self) -> str:
        parts = [str(self.kind)]
        for letter, value in (("u", self.unit), ("t", self.tile), ("m", self.micro)):
            if value >= 0:
                parts.append(f"{letter}{value}")
        return " ".join(parts)


class Wait(NamedTuple):
    """Wait for op `index` of this plan (age 0) or of the run of the same plan just before it (age 1)."""

    age: int
    index: int

    def __str__(self) -> str:
        return f"{self.index}{chr(39) * self.age}"


@dataclass(frozen=True)
class Plan:
    """A program with its waits. Steps join: `waits` holds those on the run before; on a first run they are void.

    ops: in program order. waits[i]: what op i waits for, beyond its lane's order. trains: leaves a new weight version.
    keeps: kinds of buffer beside the state whose content a later run finds.
    """

    ops: tuple[Op, ...]
    waits: tuple[tuple[Wait, ...], ...]
    trains: bool
    name: str = field(default="step")
    keeps: frozenset[Place] = frozenset()

    def buffers(self) -> dict[Buffer, None]:
        """Every buffer of the plan, in order of first use."""
        return {a.buffer: None for op in self.ops for a in op.accesses}

    def on_disk(self) -> set[Buffer]:
        """Those of its buffers that lie on disk: what the disk lanes move, but for where they move it from or to."""
        moved = (a.buffer for op in self.ops if op.lane in DISK_LANES for a in op.accesses)
        return {b for b in moved if b.place in FILED}

    def __str__(self) -> str:
        """One line an op: number, lane, op, what it reads -> what it writes, and which ops it waits for.

        9' is op 9 of the run before. A buffer that is read and written stands on the right, with a +.
        """
        lines = []
        for i, (op, waits) in enumerate(zip(self.ops, self.waits, strict=True)):
            reads = " ".join(str(a.buffer) for a in op.accesses if a.leaves is None)
            writes = " ".join(f"{a.buffer}{'+' if a.needs else ''}" for a in op.accesses if a.leaves is not None)
            after = f"  after {' '.join(map(str, waits))}" if waits else ""
            arrow = f" -> {writes}" if writes else ""
            lines.append(f"{i:3} {op.lane:8} {op!s:18} {reads}{arrow}{after}")
        return "\n".join(lines)
