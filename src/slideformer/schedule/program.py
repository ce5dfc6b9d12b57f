"""Writes a step down as if one thing happened at a time. Concurrency is derived from it elsewhere.

A program walks up the units, all micro-batches through one before the next (layer-major), turns at the head, and walks
down again; gradients leave for the host unit by unit. Two programs: eager updates each tile as it lands, deferred
keeps the gradients until the global norm is known and updates in the order in which the next forward needs the units.

Contents are tuples: what, unit or boundary, micro-batch or tile, and for state the version (0 before the step, 1 after
it). Boundary b is the input of block b; boundary `num_blocks` is the input of the head.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.hidden import HiddenPositions
from slideformer.schedule.ops import Access, Buffer, Content, LaneName, Op, OpKind, Place, Plan
from slideformer.schedule.waits import derive


class Update(StrEnum):
    EAGER = "eager"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a program depends on besides the layout.

    window: slots for block weights. grad_slots: gradient buffers for blocks. ring: tiles in the gradient ring (eager).
    hidden_pool: device positions for saved inputs and hidden gradients that stay. hidden_ring: positions through
    which the others pass. fp32_compute: both planes are uploaded, and sums over micro-batches need no buffer.
    """

    window: int = 2
    grad_slots: int = 2
    ring: int = 4
    micro_batches: int = 1
    hidden_pool: int = 0
    hidden_ring: int = 4
    update: Update = Update.EAGER
    fp32_compute: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "grad_slots", "ring", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.hidden_pool < 0:
            raise ValueError(f"hidden_pool is {self.hidden_pool}, must be at least 0")


def build_step(layout: Layout, options: StepOptions) -> Plan:
    """The plan of one training step. Raises ValueError when nothing is trainable or an option is out of range."""
    if layout.train_numel == 0:
        raise ValueError("no parameter is trainable: every name matches a frozen pattern")
    ops = _Step(layout, options).write()
    return Plan(ops, derive(ops), trains=True, name=f"{options.update} step")


def build_evaluation(layout: Layout, options: StepOptions) -> Plan:
    """The plan of one evaluation: losses only; it leaves every state as it was."""
    ops = _Program(layout, options).write()
    return Plan(ops, derive(ops), trains=False, name="evaluation")


def plan_slots(visits: list[int], num_slots: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Which slot serves each visit to a block, and which uploads follow each visit.

    Returns (slot of each visit, uploads): uploads[i + 1] are the (block, slot) pairs whose slot is free after visit i,
    uploads[0] those before the first. A block still in a slot is not uploaded again; the slot whose block is needed
    last is given up first.
    """
    uploads: list[list[tuple[int, int]]] = [[] for _ in range(len(visits) + 1)]
    holds: dict[int, int | None] = dict.fromkeys(range(num_slots))
    last_visit = dict.fromkeys(range(num_slots), -1)
    slots = []
    for i, block in enumerate(visits):
        slot = next((s for s, held in holds.items() if held == block), None)
        if slot is None:

            def next_use(s: int, i: int = i) -> tuple[int, int]:
                later = [j for j in range(i, len(visits)) if visits[j] == holds[s]]
                return (later[0] if later else len(visits), -last_visit[s])

            slot = max(holds, key=next_use)
            uploads[last_visit[slot] + 1].append((block, slot))
            holds[slot] = block
        last_visit[slot] = i
        slots.append(slot)
    return slots, uploads


class _Program:
    """The forward half, which is the whole of an evaluation. `_Step` adds the rest."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        self.layout, self.options = layout, options
        self.ops: list[Op] = []
        self.blocks = layout.blocks
        self.table, self.output = 0, layout.output
        self.glue, self.final = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
        self.num_micro = options.micro_batches
        self.visits = list(range(len(self.blocks)))
        self.hidden = HiddenPositions(self.ops.append, pool=options.hidden_pool, ring=options.hidden_ring)

    def write(self) -> tuple[Op, ...]:
        self.slots, self.uploads = plan_slots(self.visits, self.options.window)
        self.begin()
        for visit in range(len(self.blocks)):
            self.climb(visit)
            self.upload_blocks(visit + 1)
            self.upload_output(visit)
        self.turn()
        return tuple(self.ops)

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
            for place in (Place.WEIGHT, Place.RESIDUAL, Place.MOMENTS)
        )

    def planes(self, unit: int, tile: int) -> tuple[Access, ...]:
        """Accesses of whoever reads a tile's weights."""
        return self.state(unit, tile, 0)[: 2 if self.options.fp32_compute else 1]

    # the walk up

    def begin(self) -> None:
        rows_host, rows = Buffer(Place.ROWS_HOST), Buffer(Place.ROWS)
        self.emit(OpKind.LOAD, LaneName.UPLOAD, Access("batch", Buffer(Place.BATCH), None, ("batch",)))
        tiles = self.layout.tiles(self.table)
        planes = [a for t in tiles for a in self.planes(self.table, t.index)]
        self.emit(OpKind.GATHER, LaneName.GATHER, *planes, Access("rows", rows_host, None, ("rows",)), unit=self.table)
        self.emit(
            OpKind.UPLOAD_ROWS,
            LaneName.UPLOAD,
            Access("source", rows_host, ("rows",), None),
            Access("target", rows, None, ("rows",)),
            unit=self.table,
        )
        if self.glue is not None:
            self.upload(self.glue, Buffer(Place.DENSE, (self.glue,)))
        self.upload_blocks(0)

    def upload_blocks(self, after: int) -> None:
        for block, slot in self.uploads[after]:
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
        num_blocks, num_tiles = len(self.blocks), len(self.layout.tiles(self.output))
        late = self.options.update is Update.DEFERRED and not self.layout.tied
        shares = [num_tiles * i // num_blocks for i in range(num_blocks + 1)]
        if late:
            shares = [0] * num_blocks + [num_tiles]
        target = Buffer(Place.DENSE, (self.output,))
        self.upload(self.output, target, first=shares[visit], last=shares[visit + 1])
        if visit == num_blocks - 1 and self.final is not None:
            self.upload(self.final, Buffer(Place.DENSE, (self.final,)))

    def weights(self, unit: int, buffer: Buffer, role: str = "weights") -> Access:
        return Access(role, buffer, ("weights", unit, len(self.layout.tiles(unit))), None)

    def batch(self) -> Access:
        return Access("batch", Buffer(Place.BATCH), ("batch",), None)

    def call(self, micro: int) -> Access:
        return Access("call", Buffer(Place.CALL, (micro,)), ("call", micro), None)

    def glue_weights(self) -> tuple[Access, ...]:
        rows = Access("rows", Buffer(Place.ROWS), ("rows",), None)
        if self.glue is None:
            return (rows,)
        return (rows, self.weights(self.glue, Buffer(Place.DENSE, (self.glue,)), "glue"))

    def climb(self, visit: int) -> None:
        """Forward of one block, all micro-batches; the embedding goes before the first block."""
        unit, slot = self.blocks[visit], Buffer(Place.SLOT, (self.slots[visit],))
        for micro in range(self.num_micro):
            if visit == 0:
                self.embed(micro)
            source, target = ("x", visit, micro), ("x", visit + 1, micro)
            x = self.hidden.need(source)
            y = self.hidden.produce(target, uses=self.uses(target), pooled=self.pooled(target), keep=(source,))
            self.emit(
                OpKind.FORWARD,
                LaneName.COMPUTE,
                self.weights(unit, slot),
                self.call(micro),
                Access("input", x, source, None),
                Access("hidden", y, None, target),
                unit=unit,
                micro=micro,
            )
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

    def uses(self, value: Content) -> int:
        return 1

    def pooled(self, value: Content) -> bool:
        return True

    # the turn

    def head_weights(self) -> list[Access]:
        accesses = [self.weights(self.output, Buffer(Place.DENSE, (self.output,)), "output")]
        if self.final is not None:
            accesses.append(self.weights(self.final, Buffer(Place.DENSE, (self.final,)), "final"))
        return accesses

    def loss(self, micro: int) -> Access:
        return Access("loss", Buffer(Place.LOSS), ("loss", micro) if micro else None, ("loss", micro + 1))

    def turn(self) -> None:
        for micro in range(self.num_micro):
            value = ("x", len(self.blocks), micro)
            x = Access("input", self.hidden.need(value), value, None)
            accesses = [self.batch(), *self.head_weights(), x, self.loss(micro)]
            self.emit(OpKind.HEAD_LOSS, LaneName.COMPUTE, *accesses, unit=self.output, micro=micro)
            self.hidden.used(value)
        self.report_loss()
        self.emit(OpKind.RESULT, LaneName.UPDATE, Access("loss", Buffer(Place.LOSS_HOST), ("loss",), None))

    def report_loss(self) -> None:
        source = Access("source", Buffer(Place.LOSS), ("loss", self.num_micro), None)
        target = Access("target", Buffer(Place.LOSS_HOST), None, ("loss",))
        self.emit(OpKind.REPORT_LOSS, LaneName.DOWNLOAD, source, target)


class _Step(_Program):
    """A training step: the walk up, the head with its gradients, the walk down, the updates."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        super().__init__(layout, options)
        units = layout.units
        self.trained = [u.train_numel > 0 for u in units]
        self.deferred = options.update is Update.DEFERRED
        num_blocks = len(self.blocks)
        self.embeds = self.trained[self.table] or (self.glue is not None and self.trained[self.glue])
        lowest = min((b for b in range(num_blocks) if self.trained[self.blocks[b]]), default=num_blocks)
        self.floor = 0 if self.embeds else lowest
        self.visits = list(range(num_blocks)) + list(range(num_blocks - 1, self.floor - 1, -1))
        self.pooled_grads = min(self.num_micro, options.hidden_pool) if self.descends else 0
        saved = [("x", b, m) for b in range(self.floor, num_blocks) for m in range(self.num_micro)]
        room = options.hidden_pool - self.pooled_grads
        self.pooled_inputs = set(saved[max(len(saved) - room, 0) :])
        self.next_ring = 0
        self.vocabulary_tiles: deque[tuple[int, int]] = deque()
        self.norms: list[tuple[int, int]] = []

    @property
    def descends(self) -> bool:
        return self.embeds or self.floor < len(self.blocks)

    def write(self) -> tuple[Op, ...]:
        super().write()
        num_blocks = len(self.blocks)
        for visit in range(num_blocks, len(self.visits)):
            self.descend(visit)
            self.vocabulary_share(len(self.visits) - visit)
            self.upload_blocks(visit + 1)
        self.vocabulary_share(1)
        if self.embeds:
            self.embed_backward()
        if self.deferred:
            self.decide()
            self.update_all()
        else:
            self.emit(OpKind.TOTAL, LaneName.UPDATE, *self.host_norms(), self.verdict())
        return tuple(self.ops)

    def uses(self, value: Content) -> int:
        return 2 if self.floor <= value[1] < len(self.blocks) else 1

    def pooled(self, value: Content) -> bool:
        return value in self.pooled_inputs

    def sum_buffer(self, unit: int) -> Buffer:
        """Where micro-batches add up: in fp32, beside the gradient unless that is fp32 itself or nothing adds up."""
        block = self.layout.units[unit].kind is UnitKind.BLOCK
        if block:
            return Buffer(Place.GRAD_SUM) if self.separate_sum(unit) else self.grad_buffer(unit)
        return Buffer(Place.DENSE_SUM if self.separate_sum(unit) else Place.DENSE_GRAD, (unit,))

    def separate_sum(self, unit: int) -> bool:
        block = self.layout.units[unit].kind is UnitKind.BLOCK
        return not self.options.fp32_compute and (not block or self.num_micro > 1)

    def grad_buffer(self, unit: int) -> Buffer:
        if self.layout.units[unit].kind is UnitKind.BLOCK:
            return Buffer(Place.GRAD, (unit % self.options.grad_slots,))
        return Buffer(Place.DENSE_GRAD, (unit,))

    def row_buffer(self) -> Buffer:
        return Buffer(Place.ROW_GRAD if self.options.fp32_compute else Place.ROW_SUM)

    def partial(self, unit: int, micro: int, role: str) -> Access:
        needs = ("sum", unit, micro) if micro else None
        return Access(role, self.sum_buffer(unit), needs, ("sum", unit, micro + 1))

    def turn(self) -> None:
        """The head gives loss and gradients in one go; then the output projection's gradient leaves."""
        top = len(self.blocks)
        for micro in range(self.num_micro):
            value, grad = ("x", top, micro), ("d", top, micro)
            accesses = [self.batch(), *self.head_weights()]
            accesses += [Access("input", self.hidden.need(value), value, None), self.loss(micro)]
            if self.descends:
                pooled = micro < self.pooled_grads
                d = self.hidden.produce(grad, uses=1, pooled=pooled, keep=(value,))
                accesses.append(Access("hidden_grad", d, None, grad))
            if self.trained[self.output]:
                accesses.append(self.partial(self.output, micro, "output_grad"))
            if self.final is not None and self.trained[self.final]:
                accesses.append(self.partial(self.final, micro, "final_grad"))
            self.emit(OpKind.HEAD, LaneName.COMPUTE, *accesses, unit=self.output, micro=micro)
            self.hidden.used(value)
        self.report_loss()
        if not self.deferred:
            self.guard()
        if self.trained[self.table] and not self.layout.tied and not self.deferred:
            self.vocabulary_tiles += [(self.table, t.index) for t in self.layout.tiles(self.table, trained=True)]
        if self.trained[self.output]:
            self.reduce_output()
        if self.final is not None and self.trained[self.final]:
            self.finish(self.final)

    def guard(self) -> None:
        loss = Access("loss", Buffer(Place.LOSS_HOST), ("loss",), None)
        self.emit(OpKind.GUARD, LaneName.UPDATE, loss, Access("verdict", Buffer(Place.VERDICT), None, ("verdict",)))

    def verdict(self) -> Access:
        return Access("verdict", Buffer(Place.VERDICT), ("verdict",), None)

    def host_norms(self) -> list[Access]:
        return [Access("norms", Buffer(Place.NORM_HOST, key), ("norm", *key), None) for key in self.norms]

    # the walk down

    def descend(self, visit: int) -> None:
        block = self.visits[visit]
        unit, slot = self.blocks[block], Buffer(Place.SLOT, (self.slots[visit],))
        passes_on = self.embeds or block > self.floor
        for micro in range(self.num_micro):
            value, grad, below = ("x", block, micro), ("d", block + 1, micro), ("d", block, micro)
            x = self.hidden.need(value, keep=(grad,))
            d = self.hidden.need(grad, keep=(value,))
            accesses = [
                self.weights(unit, slot),
                self.call(micro),
                Access("input", x, value, None),
                Access("hidden_grad", d, grad, below if passes_on else None),
            ]
            if self.trained[unit]:
                accesses.append(self.partial(unit, micro, "grad"))
            self.emit(OpKind.BACKWARD, LaneName.COMPUTE, *accesses, unit=unit, micro=micro)
            self.hidden.used(value)
            self.hidden.replace(grad, below, uses=1 if passes_on else 0)
        if self.trained[unit]:
            self.finish(unit)

    def finish(self, unit: int) -> None:
        """Reduce, report and download a unit's gradient; in an eager program also update."""
        total, grad = self.sum_buffer(unit), self.grad_buffer(unit)
        full, done = ("sum", unit, self.num_micro), ("grad", unit)
        if total == grad:
            accesses = [Access("grad", grad, full, done)]
        else:
            accesses = [Access("sum", total, full, None), Access("grad", grad, None, done)]
        norm = Access("norm", Buffer(Place.NORM, (unit, 0)), None, ("norm", unit, 0))
        self.emit(OpKind.REDUCE, LaneName.COMPUTE, *accesses, norm, unit=unit)
        self.report(unit, 0)
        for tile in self.layout.tiles(unit, trained=True):
            landing = self.download(unit, tile.index)
            if not self.deferred:
                self.update(unit, tile.index, landing)

    def report(self, unit: int, part: int) -> None:
        self.norms.append((unit, part))
        source = Access("source", Buffer(Place.NORM, (unit, part)), ("norm", unit, part), None)
        target = Access("target", Buffer(Place.NORM_HOST, (unit, part)), None, ("norm", unit, part))
        self.emit(OpKind.REPORT, LaneName.DOWNLOAD, source, target, unit=unit)

    def download(self, unit: int, tile: int) -> Buffer:
        if self.deferred:
            landing = Buffer(Place.GRAD_HOST, (unit, tile))
        else:
            landing = Buffer(Place.RING, (self.next_ring,))
            self.next_ring = (self.next_ring + 1) % self.options.ring
        source = Access("source", self.grad_buffer(unit), ("grad", unit), None)
        target = Access("target", landing, None, ("landed", unit, tile))
        self.emit(OpKind.DOWNLOAD, LaneName.DOWNLOAD, source, target, unit=unit, tile=tile)
        return landing

    def permits(self, unit: int, part: int) -> list[Access]:
        """What an update asks before it writes: the verdict, and in an eager program the unit's own norms."""
        if self.deferred:
            return [self.verdict()]
        norm = Access("norms", Buffer(Place.NORM_HOST, (unit, part)), ("norm", unit, part), None)
        return [self.verdict(), norm]

    def update(self, unit: int, tile: int, landing: Buffer) -> None:
        self.emit(
            OpKind.UPDATE,
            LaneName.UPDATE,
            Access("grad", landing, ("landed", unit, tile), None),
            *self.permits(unit, 0),
            *self.state(unit, tile, 0, 1),
            unit=unit,
            tile=tile,
        )

    # vocabulary matrices

    def reduce_output(self) -> None:
        """The output projection's gradient. Tied: the touched rows stay on the device, where the embedding's
        gradient is added to them; the rest of the table needs nothing more and is updated as it lands."""
        unit, tied = self.output, self.layout.tied
        total, grad = self.sum_buffer(unit), self.grad_buffer(unit)
        full, done = ("sum", unit, self.num_micro), ("grad", unit)
        if total == grad:
            accesses = [Access("grad", grad, full, done)]
        else:
            accesses = [Access("sum", total, full, None), Access("grad", grad, None, done)]
        accesses.append(Access("norm", Buffer(Place.NORM, (unit, 0)), None, ("norm", unit, 0)))
        if tied:
            accesses += [self.batch(), Access("row_grad", self.row_buffer(), None, ("row_sum", 0))]
        self.emit(OpKind.REDUCE_OUTPUT, LaneName.COMPUTE, *accesses, unit=unit)
        self.report(unit, 0)
        self.vocabulary_tiles += [(unit, t.index) for t in self.layout.tiles(unit, trained=True)]

    def vocabulary_share(self, visits_left: int) -> None:
        """Tiles of the vocabulary matrices leave in equal shares behind the blocks, so that no block's gradient
        queues behind a whole matrix. Rows that an untied batch does not touch have no gradient to wait for."""
        for _ in range(-(-len(self.vocabulary_tiles) // visits_left)):
            unit, tile = self.vocabulary_tiles.popleft()
            landing = self.download(unit, tile) if unit == self.output else None
            if self.deferred:
                continue
            if unit == self.table:
                self.update_rest(tile, landing)
            else:
                assert landing is not None
                self.update(unit, tile, landing)

    def update_rest(self, tile: int, landing: Buffer | None) -> None:
        grad = () if landing is None else (Access("grad", landing, ("landed", self.table, tile), None),)
        permits = self.permits(self.table, 0) if landing is not None else [self.verdict()]
        state = self.state(self.table, tile, 0, "rest")
        self.emit(OpKind.UPDATE_REST, LaneName.UPDATE, *grad, *permits, *state, unit=self.table, tile=tile)

    def embed_backward(self) -> None:
        tied_sum = self.layout.tied and self.trained[self.table]
        for micro in range(self.num_micro):
            grad = ("d", 0, micro)
            d = self.hidden.need(grad)
            accesses = [self.batch(), *self.glue_weights(), Access("hidden_grad", d, grad, None)]
            if self.trained[self.table]:
                needs = ("row_sum", micro) if micro or tied_sum else None
                accesses.append(Access("row_grad", self.row_buffer(), needs, ("row_sum", micro + 1)))
            if self.glue is not None and self.trained[self.glue]:
                accesses.append(self.partial(self.glue, micro, "glue_grad"))
            self.emit(OpKind.EMBED_BACKWARD, LaneName.COMPUTE, *accesses, unit=self.table, micro=micro)
            self.hidden.used(grad)
        if self.trained[self.table]:
            self.finish_rows()
        if self.glue is not None and self.trained[self.glue]:
            self.finish(self.glue)

    def finish_rows(self) -> None:
        total, grad, full = self.row_buffer(), Buffer(Place.ROW_GRAD), ("row_sum", self.num_micro)
        if total == grad:
            accesses = [Access("grad", grad, full, ("row_grad",))]
        else:
            accesses = [Access("sum", total, full, None), Access("grad", grad, None, ("row_grad",))]
        norm = Access("norm", Buffer(Place.NORM, (self.table, 1)), None, ("norm", self.table, 1))
        self.emit(OpKind.REDUCE_ROWS, LaneName.COMPUTE, *accesses, norm, unit=self.table)
        self.report(self.table, 1)
        source = Access("source", grad, ("row_grad",), None)
        target = Access("target", Buffer(Place.ROW_GRAD_HOST), None, ("row_grad",))
        self.emit(OpKind.DOWNLOAD_ROWS, LaneName.DOWNLOAD, source, target, unit=self.table)
        if not self.deferred:
            self.update_rows()

    def update_rows(self) -> None:
        grad = Access("grad", Buffer(Place.ROW_GRAD_HOST), ("row_grad",), None)
        tiles = self.layout.tiles(self.table, trained=True)
        state = [a for t in tiles for a in self.state(self.table, t.index, "rest", 1)]
        permits = self.permits(self.table, 1)
        self.emit(OpKind.UPDATE_ROWS, LaneName.UPDATE, grad, *permits, *state, unit=self.table)

    # deferred

    def decide(self) -> None:
        loss = Access("loss", Buffer(Place.LOSS_HOST), ("loss",), None)
        verdict = Access("verdict", Buffer(Place.VERDICT), None, ("verdict",))
        self.emit(OpKind.DECIDE, LaneName.UPDATE, loss, *self.host_norms(), verdict)

    def update_all(self) -> None:
        """In the order in which the next forward needs the units."""
        for unit in range(len(self.layout.units)):
            if not self.trained[unit]:
                continue
            for tile in self.layout.tiles(unit, trained=True):
                landing = Buffer(Place.GRAD_HOST, (unit, tile.index))
                if unit == self.table:
                    self.update_rest(tile.index, landing if self.layout.tied else None)
                else:
                    self.update(unit, tile.index, landing)
            if unit == self.table:
                self.update_rows()
