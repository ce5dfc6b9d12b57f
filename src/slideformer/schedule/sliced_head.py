"""The head with its projection in slices of the vocabulary, so that neither it nor its gradient is ever whole on the
device.

The tiles of the output unit pass through a few positions twice: upward every micro-batch takes each into its sums, and
the loss is known; downward each tile gets its gradient, complete, and it leaves at once. The tiles that came last are
still there when the second pass begins with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slideformer.schedule.ops import Access, Buffer, LaneName, OpKind, Place

if TYPE_CHECKING:
    from slideformer.schedule.gradients import Gradients
    from slideformer.schedule.program import Program

POSITIONS = 2
FIRST_PART = 2
"""Norms of tiles are parts of the output unit from here on; part 0 is the whole matrix, 1 the table's touched rows."""


class SlicedHead:
    """Emits the ops of one turn into a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.unit = program, program.output
        self.tiles = program.layout.tiles(program.output)
        self._taken = 0  # tiles that every micro-batch has taken, in both passes

    def see(self) -> None:
        """Up to the loss."""
        program = self.program
        for micro in range(program.num_micro):
            value = ("x", len(program.blocks), micro)
            accesses = [program.batch(), *program.final_weights()]
            accesses.append(Access("input", program.hidden.need(value), value, None))
            accesses.append(Access("state", self._cell(micro), None, ("head", micro, 0)))
            program.emit(OpKind.HEAD_OPEN, LaneName.COMPUTE, *accesses, unit=self.unit, micro=micro)
            program.hidden.used(value)
        for tile in self.tiles:
            self._upload(tile.index)
            program.emit(
                OpKind.HEAD_SEE,
                LaneName.COMPUTE,
                self._slice(tile.index),
                *self._bias(),
                *self._states(),
                **self._at(tile),
            )
        loss = Access("loss", Buffer(Place.LOSS), None, ("loss", program.num_micro))
        program.emit(OpKind.HEAD_TOTAL, LaneName.COMPUTE, *self._states(), loss, unit=self.unit)
        program.report_loss()

    def grads(self, program: Gradients) -> None:
        """Downward. program: the one that this turn is in."""
        trained = program.trained[self.unit]
        for done, tile in enumerate(reversed(self.tiles)):
            if done >= POSITIONS:
                self._upload(tile.index)
            accesses = [self._slice(tile.index), *self._bias(), *self._states()]
            if trained:
                accesses.append(Access("grad", self._sum(), None, ("slice_sum", tile.index)))
            program.emit(OpKind.HEAD_GRADS, LaneName.COMPUTE, *accesses, **self._at(tile))
            if trained:
                self._reduce(program, tile.index, done)
                self._leave(program, tile.index)
        if trained:
            rows = Access("row_norms", Buffer(Place.ROW_NORM), ("row_norms", len(self.tiles)), None)
            norm = Access("norm", Buffer(Place.NORM, (self.unit, 0)), None, ("norm", self.unit, 0))
            program.emit(OpKind.NORM_OUTPUT, LaneName.COMPUTE, rows, norm, unit=self.unit)
            program.report(self.unit, 0)
        for micro in range(program.num_micro):
            accesses = [program.batch(), *program.final_weights()]
            accesses.append(Access("state", self._cell(micro), ("head", micro, self._taken), ("spent", micro)))
            if program.descends:
                grad = ("d", len(program.blocks), micro)
                d = program.hidden.produce(grad, uses=1, pooled=micro < program.pooled_grads)
                accesses.append(Access("hidden_grad", d, None, grad))
            if program.final is not None and program.trained[program.final]:
                accesses.append(program.partial(program.final, micro, "final_grad"))
            program.emit(OpKind.HEAD_CLOSE, LaneName.COMPUTE, *accesses, unit=self.unit, micro=micro)

    def _reduce(self, program: Gradients, tile: int, done: int) -> None:
        """Rounded, with norms row by row. Tied: the touched rows go where the embedding's gradient will be added."""
        total, grad = self._sum(), self._grad(tile)
        accesses = [Access("sum", total, ("slice_sum", tile), None)]
        accesses.append(Access("grad", grad, None, ("slice_grad", tile)))
        rows = Buffer(Place.ROW_NORM)
        accesses.append(Access("row_norms", rows, ("row_norms", done) if done else None, ("row_norms", done + 1)))
        part = (self.unit, FIRST_PART + tile)
        accesses.append(Access("norm", Buffer(Place.NORM, part), None, ("norm", *part)))
        if program.layout.tied:
            needs = ("row_part", done) if done else None
            leaves = ("row_part", done + 1) if done + 1 < len(self.tiles) else ("row_sum", 0)
            accesses += [program.batch(), Access("row_grad", program.row_buffer(), needs, leaves)]
        program.emit(OpKind.REDUCE_SLICE, LaneName.COMPUTE, *accesses, unit=self.unit, tile=tile)

    def _leave(self, program: Gradients, tile: int) -> None:
        part = FIRST_PART + tile
        source = Access("source", Buffer(Place.NORM, (self.unit, part)), ("norm", self.unit, part), None)
        target = Access("target", Buffer(Place.NORM_HOST, (self.unit, part)), None, ("norm", self.unit, part))
        program.emit(OpKind.REPORT, LaneName.DOWNLOAD, source, target, unit=self.unit)
        landing = program.landing(self.unit, tile)
        source = Access("slice", self._grad(tile), ("slice_grad", tile), None)
        target = Access("target", landing, None, ("landed", self.unit, tile))
        program.emit(OpKind.DOWNLOAD, LaneName.DOWNLOAD, source, target, unit=self.unit, tile=tile)
        program.landed(self.unit, tile, landing)

    def _upload(self, tile: int) -> None:
        into = Access("slice", self._position(tile), None, ("slice", tile))
        planes = self.program.planes(self.unit, tile)
        self.program.emit(OpKind.UPLOAD, LaneName.UPLOAD, *planes, into, unit=self.unit, tile=tile)

    def _states(self) -> list[Access]:
        """Of all micro-batches, one tile further."""
        before, self._taken = self._taken, self._taken + 1
        micros = range(self.program.num_micro)
        return [Access("state", self._cell(m), ("head", m, before), ("head", m, before + 1)) for m in micros]

    def _slice(self, tile: int) -> Access:
        return Access("weights", self._position(tile), ("slice", tile), None)

    def _bias(self) -> tuple[Access, ...]:
        return self.program.final_weights()

    def _at(self, tile: object) -> dict[str, int]:
        return {"unit": self.unit, "tile": tile.index}

    @staticmethod
    def _position(tile: int) -> Buffer:
        return Buffer(Place.SLICE, (tile % POSITIONS,))

    @staticmethod
    def _grad(tile: int) -> Buffer:
        return Buffer(Place.SLICE_GRAD, (tile % POSITIONS,))

    @staticmethod
    def _sum() -> Buffer:
        return Buffer(Place.SLICE_SUM)

    @staticmethod
    def _cell(micro: int) -> Buffer:
        return Buffer(Place.HEAD_STATE, (micro,))
