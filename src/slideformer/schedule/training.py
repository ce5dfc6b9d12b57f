"""The training half of a step: the head with its gradients, the walk down, the updates.

Gradients leave for the host unit by unit. Two programs: eager updates each tile as it lands; deferred keeps the
gradients until the global norm is known and updates in the order in which the next forward needs the units.
"""

from __future__ import annotations

from collections import deque

from slideformer.layout import Layout
from slideformer.schedule.disk import staged
from slideformer.schedule.gradients import Gradients
from slideformer.schedule.ops import Access, Buffer, Content, LaneName, Op, OpKind, Place, Plan
from slideformer.schedule.options import StepOptions
from slideformer.schedule.sliced_head import SlicedHead
from slideformer.schedule.waits import derive


def step_ops(layout: Layout, options: StepOptions) -> tuple[Op, ...]:
    """The ops of `build_step` without their waits, in a fraction of the time: for whoever only counts buffers."""
    return staged(_TrainingProgram(layout, options).write(), options)


def build_step(layout: Layout, options: StepOptions, *, ops: tuple[Op, ...] | None = None) -> Plan:
    """The plan of one training step. ops: what `step_ops` gave for the same, where that is at hand. Raises ValueError
    when nothing is trainable or an option is out of range."""
    if layout.train_numel == 0:
        raise ValueError("no parameter is trainable: every name matches a frozen pattern")
    ops = step_ops(layout, options) if ops is None else ops
    return Plan(ops, derive(ops), trains=True, name=f"{options.update} step")


class _TrainingProgram(Gradients):
    """A training step: the walk up, the head with its gradients, the walk down, the updates."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        super().__init__(layout, options)
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
        self.vocabulary_tiles: deque[tuple[int, int]] = deque()

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

    def pooled(self, value: Content) -> bool:
        return value in self.pooled_inputs

    def turn(self) -> None:
        sliced = SlicedHead(self) if self.options.sliced_head else None
        if sliced is not None:
            sliced.see()
        else:
            self.head()
        if not self.deferred:
            self.guard()
        early = not self.deferred or self.table in self.ahead
        if self.trained[self.table] and self.table not in self.resident and not self.layout.tied and early:
            self.vocabulary_tiles += [(self.table, t.index) for t in self.layout.tiles(self.table, trained=True)]
        if sliced is not None:
            sliced.grads(self)
        elif self.trained[self.output]:
            self.reduce_output()
        if self.final is not None and self.trained[self.final]:
            self.finish(self.final)

    def head(self) -> None:
        """Loss and gradients in one go; then the output projection's gradient leaves in shares."""
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
            self.landed(unit, tile, self.download(unit, tile) if unit == self.output else None)

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
