"""Writes a step down as if one thing happened at a time: the walk up, and the turn of an evaluation.

A program walks up the units, all micro-batches through one before the next (layer-major), and turns at the head.
Concurrency is derived from it elsewhere. Contents are tuples: what, unit or boundary, micro-batch or tile, and for
state the version (0 before the step, 1 after it). Boundary b is the input of block b; boundary `num_blocks` is the
input of the head.
"""

from __future__ import annotations

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.disk import staged
from slideformer.schedule.hidden import HiddenPositions
from slideformer.schedule.ops import STATE, Access, Buffer, Content, LaneName, Op, OpKind, Place, Plan
from slideformer.schedule.options import StepOptions, Update
from slideformer.schedule.sliced_head import SlicedHead
from slideformer.schedule.slots import plan_slots
from slideformer.schedule.waits import derive


def evaluation_ops(layout: Layout, options: StepOptions) -> tuple[Op, ...]:
    """The ops of `build_evaluation` without their waits."""
    return staged(Program(layout, options).write(), options)


def build_evaluation(layout: Layout, options: StepOptions) -> Plan:
    """The plan of one evaluation: losses only; it leaves every state as it was."""
    ops = evaluation_ops(layout, options)
    return Plan(ops, derive(ops), trains=False, name="evaluation")


class Program:
    """The forward half, which is the whole of an evaluation. A training step builds on it.

    loads: the lane that brings the batch and its rows of the table.
    """

    loads = LaneName.UPLOAD

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        self.layout, self.options = layout, options
        self.ops: list[Op] = []
        self.blocks = layout.blocks
        self.table, self.output = 0, layout.output
        self.glue, self.final = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
        self.num_micro = options.micro_batches
        self.resident = frozenset(options.resident)
        if options.sliced_head and self.output in self.resident:
            raise ValueError("the output projection is resident, so there is nothing to slice")
        self.visits = list(range(len(self.blocks)))
        self.hidden = HiddenPositions(self.ops.append, pool=options.hidden_pool, ring=options.hidden_ring)

    def write(self) -> tuple[Op, ...]:
        self.place_blocks()
        self.begin()
        for visit in range(len(self.blocks)):
            self.climb(visit)
            self.upload_blocks(visit + 1)
            self.upload_output(visit)
        self.turn()
        return tuple(self.ops)

    def place_blocks(self) -> None:
        """The slot of every visit to a streamed block, and the uploads after each visit."""
        streamed = [i for i, block in enumerate(self.visits) if self.blocks[block] not in self.resident]
        slots, uploads = plan_slots([self.visits[i] for i in streamed], self.options.window)
        self.slots = dict(zip(streamed, slots, strict=True))
        self.uploads = dict(zip([0, *(i + 1 for i in streamed)], uploads, strict=True))

    # emission

    def emit(self, kind: OpKind, lane: LaneName, *accesses: Access, unit: int = -1, tile: int = -1, micro: int = -1):
        self.ops.append(Op(kind, lane, accesses, unit, tile, micro))

    def state(self, unit: int, tile: int, needs: int | str, leaves: int | str | None = None) -> tuple[Access, ...]:
        """Accesses of an update to a tile's weight, residual and moments."""
        return tuple(
            Access(
                str(place),
                Buffer(place, (unit, tile)),
                (str(place), unit, tile, needs),
                None if leaves is None else (str(place), unit, tile, leaves),
            )
            for place in STATE
        )

    @property
    def read_places(self) -> tuple[Place, ...]:
        """The planes of a master weight that are read by whoever reads it."""
        return STATE[: 2 if self.options.fp32_compute else 1]

    def rows_planes(self, unit: int, tile: int) -> tuple[Access, ...]:
        """Accesses of whoever reads the weights of a batch's rows of a tile of the table."""
        index = (unit, tile)
        return tuple(Access(str(p), Buffer(p, index), (str(p), unit, tile, 0), None) for p in self.read_places)

    def planes(self, unit: int, tile: int) -> tuple[Access, ...]:
        """Accesses of whoever reads all weights of a tile."""
        others = (self.other_rows(unit, tile),) if self.settles_in_two(unit) else ()
        return (*self.rows_planes(unit, tile), *others)

    def settles_in_two(self, unit: int) -> bool:
        """After the verdict, the rows that the next batch reads first."""
        return unit == self.table and unit in self.options.ahead and self.layout.units[unit].train_numel > 0

    def other_rows(self, unit: int, tile: int, needs: int | str = 0, leaves: int | str | None = None) -> Access:
        found, left = (None if v is None else ("other_rows", unit, tile, v) for v in (needs, leaves))
        return Access("other_rows", Buffer(Place.OTHER_ROWS, (unit, tile)), found, left)

    # the walk up

    def begin(self) -> None:
        self.load_rows()
        self.upload_glue()
        self.upload_blocks(0)

    def load(self) -> None:
        self.emit(OpKind.LOAD, self.loads, Access("batch", Buffer(Place.BATCH), None, ("batch",)))

    def load_rows(self) -> None:
        rows_host, rows = Buffer(Place.ROWS_HOST), Buffer(Place.ROWS)
        self.load()
        if self.table in self.resident:
            found = (self.weights(self.table, "table"), Access("target", rows, None, ("rows",)))
            self.emit(OpKind.PICK_ROWS, LaneName.COMPUTE, self.batch(), *found, unit=self.table)
            return
        tiles = self.layout.tiles(self.table)
        for tile in tiles:
            into = Access("rows", rows_host, ("rows", tile.index) if tile.index else None, ("rows", tile.index + 1))
            planes = self.rows_planes(self.table, tile.index)
            self.emit(OpKind.GATHER, LaneName.GATHER, *planes, into, unit=self.table, tile=tile.index)
        self.emit(
            OpKind.UPLOAD_ROWS,
            self.loads,
            Access("source", rows_host, ("rows", len(tiles)), None),
            Access("target", rows, None, ("rows",)),
            unit=self.table,
        )

    def upload_glue(self) -> None:
        if self.glue is not None and self.glue not in self.resident:
            self.upload(self.glue, Buffer(Place.DENSE, (self.glue,)))

    def upload_blocks(self, after: int) -> None:
        for block, slot in self.uploads.get(after, ()):
            self.upload(self.blocks[block], Buffer(Place.SLOT, (slot,)))

    def upload(self, unit: int, target: Buffer, *, first: int = 0, last: int | None = None) -> None:
        for tile in self.layout.tiles(unit)[first:last]:
            filled: Content | None = ("weights", unit, tile.index) if tile.index else None
            into = Access("target", target, filled, ("weights", unit, tile.index + 1))
            self.emit(OpKind.UPLOAD, LaneName.UPLOAD, *self.planes(unit, tile.index), into, unit=unit, tile=tile.index)

    def upload_output(self, visit: int) -> None:
        """The vocabulary matrix crosses in shares, one beside each block, so that no block waits long behind it.

        A deferred program updates an untied one last of all; there it follows the last block.
        """
        late = self.options.update is Update.DEFERRED and not self.layout.tied
        last = visit == len(self.blocks) - 1
        first, end = (0, len(self.layout.tiles(self.output)) * last) if late else self.output_share(visit)
        if self.output not in self.resident and not self.options.sliced_head:
            self.upload(self.output, Buffer(Place.DENSE, (self.output,)), first=first, last=end)
        if last and self.final is not None and self.final not in self.resident:
            self.upload(self.final, Buffer(Place.DENSE, (self.final,)))

    def output_share(self, visit: int) -> tuple[int, int]:
        """The tiles of the vocabulary matrix that go beside a block: [first, end)."""
        num_blocks, num_tiles = len(self.blocks), len(self.layout.tiles(self.output))
        return num_tiles * visit // num_blocks, num_tiles * (visit + 1) // num_blocks

    def weights(self, unit: int, role: str) -> Access:
        """Of a unit with a place of its own on the device."""
        if unit in self.resident:
            return Access(role, Buffer(Place.HOME, (unit,)), ("home", unit, 0), None)
        return Access(role, Buffer(Place.DENSE, (unit,)), ("weights", unit, len(self.layout.tiles(unit))), None)

    def block_weights(self, visit: int) -> Access:
        unit = self.blocks[self.visits[visit]]
        if unit in self.resident:
            return self.weights(unit, "weights")
        slot = Buffer(Place.SLOT, (self.slots[visit],))
        return Access("weights", slot, ("weights", unit, len(self.layout.tiles(unit))), None)

    def batch(self) -> Access:
        return Access("batch", Buffer(Place.BATCH), ("batch",), None)

    def call(self, micro: int) -> Access:
        return Access("call", Buffer(Place.CALL, (micro,)), ("call", micro), None)

    def glue_weights(self) -> tuple[Access, ...]:
        rows = Access("rows", Buffer(Place.ROWS), ("rows",), None)
        if self.glue is None:
            return (rows,)
        return (rows, self.weights(self.glue, "glue"))

    def climb(self, visit: int) -> None:
        """Forward of one block, all micro-batches; the embedding goes before the first block."""
        unit = self.blocks[visit]
        keep = self.keeps(unit)
        for micro in range(self.num_micro):
            if visit == 0:
                self.embed(micro)
            source, target = ("x", visit, micro), ("x", visit + 1, micro)
            x = self.hidden.need(source)
            y = self.hidden.produce(target, uses=self.uses(target), pooled=self.pooled(target), keep=(source,))
            accesses = [self.block_weights(visit), self.call(micro), Access("input", x, source, None)]
            accesses.append(Access("hidden", y, None, target))
            if keep:
                accesses.append(Access("graph", Buffer(Place.GRAPH, (unit, micro)), None, ("graph", unit, micro)))
            kind = OpKind.FORWARD_KEEP if keep else OpKind.FORWARD
            self.emit(kind, LaneName.COMPUTE, *accesses, unit=unit, micro=micro)
            self.hidden.used(source)

    def embed(self, micro: int) -> None:
        value = ("x", 0, micro)
        x = self.hidden.produce(value, uses=self.uses(value), pooled=self.pooled(value))
        self.emit(
            OpKind.EMBED,
            LaneName.COMPUTE,
            self.batch(),
            *self.glue_weights(),
            Access("call", Buffer(Place.CALL, (micro,)), None, ("call", micro)),
            Access("hidden", x, None, value),
            unit=self.table,
            micro=micro,
        )

    def keeps(self, unit: int) -> bool:
        return False

    def uses(self, value: Content) -> int:
        return 1

    def pooled(self, value: Content) -> bool:
        return True

    # the turn

    def head_weights(self) -> list[Access]:
        return [self.weights(self.output, "output"), *self.final_weights()]

    def final_weights(self) -> tuple[Access, ...]:
        return () if self.final is None else (self.weights(self.final, "final"),)

    def loss(self, micro: int) -> Access:
        return Access("loss", Buffer(Place.LOSS), ("loss", micro) if micro else None, ("loss", micro + 1))

    def turn(self) -> None:
        if self.options.sliced_head:
            SlicedHead(self).see()
        else:
            self.head_loss()
        self.emit(OpKind.RESULT, LaneName.UPDATE, Access("loss", Buffer(Place.LOSS_HOST), ("loss",), None))

    def head_loss(self) -> None:
        for micro in range(self.num_micro):
            value = ("x", len(self.blocks), micro)
            x = Access("input", self.hidden.need(value), value, None)
            accesses = [self.batch(), *self.head_weights(), x, self.loss(micro)]
            self.emit(OpKind.HEAD_LOSS, LaneName.COMPUTE, *accesses, unit=self.output, micro=micro)
            self.hidden.used(value)
        self.report_loss()

    def report_loss(self) -> None:
        source = Access("source", Buffer(Place.LOSS), ("loss", self.num_micro), None)
        target = Access("target", Buffer(Place.LOSS_HOST), None, ("loss",))
        self.emit(OpKind.REPORT_LOSS, LaneName.DOWNLOAD, source, target)
