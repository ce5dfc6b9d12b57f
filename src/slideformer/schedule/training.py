"""The training half of a step: the head with its gradients, the walk down, the updates.

Gradients leave for the host unit by unit. Two programs: eager updates each tile as it lands; deferred keeps the
gradients until the global norm is known and updates in the order in which the next forward needs the units.
"""

from __future__ import annotations

from collections import deque

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.ops import Access, Buffer, Content, LaneName, Op, OpKind, Place, Plan
from slideformer.schedule.options import StepOptions, Update
from slideformer.schedule.program import Program
from slideformer.schedule.waits import derive


def build_step(layout: Layout, options: StepOptions) -> Plan:
    """The plan of one training step. Raises ValueError when nothing is trainable or an option is out of range."""
    if layout.train_numel == 0:
        raise ValueError("no parameter is trainable: every name matches a frozen pattern")
    ops = _TrainingProgram(layout, options).write()
    return Plan(ops, derive(ops), trains=True, name=f"{options.update} step")


class _TrainingProgram(Program):
    """A training step: the walk up, the head with its gradients, the walk down, the updates."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        super().__init__(layout, options)
        units = layout.units
        self.trained = [u.train_numel > 0 for u in units]
        self.deferred = options.update is Update.DEFERRED
        self.ahead = frozenset(u for u in options.ahead if self.trained[u])
        num_blocks = len(self.blocks)
        self.embeds = self.trained[self.table] or (self.glue is not None and self.trained[self.glue])
        lowest = min((b for b in range(num_blocks) if self.trained[self.blocks[b]]), default=num_blocks)
        self.floor = 0 if self.embeds else lowest
        self.visits = list(range(num_blocks)) + list(range(num_blocks - 1, self.floor - 1, -1))
        self.pooled_grads = min(self.num_micro, options.hidden_pool) if self.descends else 0
        saved = [("x", b, m) for b in range(self.floor, num_blocks) for m in range(self.num_micro)]
        saved = [value for value in saved if not self.keeps(self.blocks[value[1]])]
        room = options.hidden_pool - self.pooled_grads
        self.pooled_inputs = set(saved[max(len(saved) - room, 0) :])
        # inputs that are not saved need positions only until the gradients take them, but for one beside the last
        passing = [num_blocks, *(b for b in range(num_blocks) if self.keeps(self.blocks[b]))]
        self.pooled_inputs |= {("x", b, m) for b in passing for m in range(self.pooled_grads - 1)}
        self.next_ring = 0
        downward = [u for u in reversed(self.blocks) if self.trained[u] and not self.grad_waits(u)]
        self.grad_slot = {unit: i % options.grad_slots for i, unit in enumerate(downward)}
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
            for unit in self.blocks:
                if unit in self.options.late and self.trained[unit]:
                    self.leave(unit)
            self.emit(OpKind.TOTAL, LaneName.UPDATE, *self.host_norms(), self.verdict())
        return tuple(self.ops)

    def begin(self) -> None:
        """Uploads start in the order in which the step before finishes its updates: an eager one goes down the blocks
        and ends with the rows, a deferred one goes up. So none queues behind one that cannot start yet."""
        if self.deferred:
            super().begin()
            return
        for block, slot in reversed(self.uploads.get(0, ())):
            self.upload(self.blocks[block], Buffer(Place.SLOT, (slot,)))
        self.load_rows()
        self.upload_glue()

    def uses(self, value: Content) -> int:
        block = value[1]
        if not self.floor <= block < len(self.blocks):
            return 1
        return 1 if self.keeps(self.blocks[block]) else 2

    def keeps(self, unit: int) -> bool:
        return unit in self.options.keep and unit >= self.blocks[0] + self.floor

    def grad_waits(self, unit: int) -> bool:
        """The gradient has a place of its own on the device, where it stays when backward goes on."""
        return self.deferred and unit in self.resident or unit in self.options.late

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
        if self.layout.units[unit].kind is UnitKind.BLOCK and not self.grad_waits(unit):
            return Buffer(Place.GRAD, (self.grad_slot[unit],))
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
        early = not self.deferred or self.table in self.ahead
        if self.trained[self.table] and self.table not in self.resident and not self.layout.tied and early:
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
        return [Access("norms", Buffer(Place.NORM_HOST, key), ("norm", *key), None) for key in sorted(self.norms)]

    # the walk down

    def descend(self, visit: int) -> None:
        block = self.visits[visit]
        unit = self.blocks[block]
        kept = self.keeps(unit)
        passes_on = self.embeds or block > self.floor
        for micro in range(self.num_micro):
            value, grad, below = ("x", block, micro), ("d", block + 1, micro), ("d", block, micro)
            accesses = [self.block_weights(visit)]
            if kept:
                full, spent = ("graph", unit, micro), ("spent", unit, micro)
                accesses.append(Access("graph", Buffer(Place.GRAPH, (unit, micro)), full, spent))
            else:
                x = self.hidden.need(value, keep=(grad,))
                accesses += [self.call(micro), Access("input", x, value, None)]
            d = self.hidden.need(grad, keep=() if kept else (value,))
            accesses.append(Access("hidden_grad", d, grad, below if passes_on else None))
            if self.trained[unit]:
                accesses.append(self.partial(unit, micro, "grad"))
            kind = OpKind.BACKWARD_KEPT if kept else OpKind.BACKWARD
            self.emit(kind, LaneName.COMPUTE, *accesses, unit=unit, micro=micro)
            if not kept:
                self.hidden.used(value)
            self.hidden.replace(grad, below, uses=1 if passes_on else 0)
        if self.trained[unit]:
            self.finish(unit)

    def finish(self, unit: int) -> None:
        """Reduce and report a unit's gradient, and download it unless the unit is resident; eager: also update."""
        total, grad = self.sum_buffer(unit), self.grad_buffer(unit)
        full, done = ("sum", unit, self.num_micro), ("grad", unit)
        if total == grad:
            accesses = [Access("grad", grad, full, done)]
        else:
            accesses = [Access("sum", total, full, None), Access("grad", grad, None, done)]
        norm = Access("norm", Buffer(Place.NORM, (unit, 0)), None, ("norm", unit, 0))
        self.emit(OpKind.REDUCE, LaneName.COMPUTE, *accesses, norm, unit=unit)
        self.report(unit, 0)
        if unit in self.resident:
            if not self.deferred:
                self.update_resident(unit)
        elif unit not in self.options.late:
            self.leave(unit)

    def leave(self, unit: int) -> None:
        for tile in self.layout.tiles(unit, trained=True):
            landing = self.download(unit, tile.index)
            if unit in self.ahead:
                self.update_ahead(unit, tile.index, landing)
            elif not self.deferred:
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
        if unit not in self.resident:
            self.vocabulary_tiles += [(unit, t.index) for t in self.layout.tiles(unit, trained=True)]
        elif not tied and not self.deferred:
            self.update_resident(unit)

    def vocabulary_share(self, visits_left: int) -> None:
        """Tiles of the vocabulary matrices leave in equal shares behind the blocks, so that no block's gradient
        queues behind a whole matrix. Rows that an untied batch does not touch have no gradient to wait for."""
        for _ in range(-(-len(self.vocabulary_tiles) // visits_left)):
            unit, tile = self.vocabulary_tiles.popleft()
            landing = self.download(unit, tile) if unit == self.output else None
            if unit in self.ahead:
                self.update_ahead(unit, tile, landing)
            elif self.deferred:
                continue
            elif unit == self.table:
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
        if self.table in self.resident:
            if not self.deferred:
                self.update_resident_table()
            return
        source = Access("source", grad, ("row_grad",), None)
        target = Access("target", Buffer(Place.ROW_GRAD_HOST), None, ("row_grad",))
        self.emit(OpKind.DOWNLOAD_ROWS, LaneName.DOWNLOAD, source, target, unit=self.table)
        if not self.deferred:
            for tile in self.layout.tiles(self.table, trained=True):
                self.update_rows(tile.index)

    def update_rows(self, tile: int) -> None:
        grad = Access("grad", Buffer(Place.ROW_GRAD_HOST), ("row_grad",), None)
        permits, state = self.permits(self.table, 1), self.state(self.table, tile, "rest", 1)
        self.emit(OpKind.UPDATE_ROWS, LaneName.UPDATE, grad, *permits, *state, unit=self.table, tile=tile)

    # resident units

    def update_resident(self, unit: int) -> None:
        """In the lane of the model's own work, which has the state in hand: a few ms for a unit of any size."""
        grad = Access("grad", self.grad_buffer(unit), ("grad", unit), None)
        self.emit(OpKind.UPDATE_RESIDENT, LaneName.COMPUTE, grad, self.verdict(), self.home(unit), unit=unit)

    def update_resident_table(self) -> None:
        """Tied: the touched rows' gradient takes its place in the output projection's. Untied: all others' is zero."""
        accesses = [self.verdict(), self.home(self.table), self.batch()]
        accesses.append(Access("row_grad", Buffer(Place.ROW_GRAD), ("row_grad",), None))
        if self.layout.tied:
            grad = Buffer(Place.DENSE_GRAD, (self.table,))
            accesses.append(Access("grad", grad, ("grad", self.table), ("spent", self.table)))
        self.emit(OpKind.UPDATE_RESIDENT_TABLE, LaneName.COMPUTE, *accesses, unit=self.table)

    def home(self, unit: int) -> Access:
        return Access("home", Buffer(Place.HOME, (unit,)), ("home", unit, 0), ("home", unit, 1))

    # deferred

    def decide(self) -> None:
        loss = Access("loss", Buffer(Place.LOSS_HOST), ("loss",), None)
        verdict = Access("verdict", Buffer(Place.VERDICT), None, ("verdict",))
        self.emit(OpKind.DECIDE, LaneName.UPDATE, loss, *self.host_norms(), verdict)

    def update_ahead(self, unit: int, tile: int, landing: Buffer | None) -> None:
        """The norms so far tell whether clipping is certain already; then there is nothing to hope for."""
        accesses = list(self.state(unit, tile, 0))
        if landing is not None:
            norms = Access("norms", Buffer(Place.NORM_HOST, (unit, 0)), ("norm", unit, 0), None)
            accesses += [Access("grad", landing, ("landed", unit, tile), None), norms]
        accesses.append(Access("spare", Buffer(Place.SPARE, (unit, tile)), None, ("spare", unit, tile)))
        kind = OpKind.REST_AHEAD if unit == self.table else OpKind.UPDATE_AHEAD
        self.emit(kind, LaneName.UPDATE, *accesses, unit=unit, tile=tile)

    def settle(self, unit: int, tile: int) -> None:
        accesses = [self.verdict(), *self.state(unit, tile, 0, 1)]
        accesses.append(
            Access("spare", Buffer(Place.SPARE, (unit, tile)), ("spare", unit, tile), ("spent", unit, tile))
        )
        if unit != self.table or self.layout.tied:
            accesses.append(Access("grad", Buffer(Place.GRAD_HOST, (unit, tile)), ("landed", unit, tile), None))
        if unit == self.table:
            accesses.append(Access("row_grad", Buffer(Place.ROW_GRAD_HOST), ("row_grad",), None))
        kind = OpKind.SETTLE_ROWS if unit == self.table else OpKind.SETTLE
        self.emit(kind, LaneName.UPDATE, *accesses, unit=unit, tile=tile)

    def update_all(self) -> None:
        """In the order in which the next forward needs the units."""
        for unit in range(len(self.layout.units)):
            if not self.trained[unit]:
                continue
            if unit in self.resident:
                self.update_resident_table() if unit == self.table else self.update_resident(unit)
                continue
            for tile in self.layout.tiles(unit, trained=True):
                landing = Buffer(Place.GRAD_HOST, (unit, tile.index))
                if unit in self.ahead:
                    self.settle(unit, tile.index)
                elif unit == self.table:
                    self.update_rest(tile.index, landing if self.layout.tied else None)
                    self.update_rows(tile.index)
                else:
                    self.update(unit, tile.index, landing)
