"""What becomes of gradients: where they add up, how they leave the device, and the updates that they go into.

A unit's gradient is reduced, its norms are reported, and then it leaves tile by tile, or stays if its unit is resident
or late. An eager update takes a tile as it lands; deferred ones follow the verdict, or run ahead of it.
"""

from __future__ import annotations

from collections import deque

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.ops import Access, Buffer, LaneName, OpKind, Place
from slideformer.schedule.options import StepOptions, Update
from slideformer.schedule.program import Program
from slideformer.schedule.sliced_head import FIRST_PART


class Gradients(Program):
    """A program whose units have gradients. What calls for them, and in which order, is the training program's."""

    def __init__(self, layout: Layout, options: StepOptions) -> None:
        super().__init__(layout, options)
        self.trained = [u.train_numel > 0 for u in layout.units]
        self.deferred = options.update is Update.DEFERRED
        self.ahead = frozenset(u for u in options.ahead if self.trained[u])
        downward = [u for u in reversed(self.blocks) if self.trained[u] and not self.grad_waits(u)]
        self.grad_slot = {unit: i % options.grad_slots for i, unit in enumerate(downward)}
        self.next_ring = 0
        self.norms: list[tuple[int, int]] = []
        self.early: list[tuple[int, int]] = []  # (unit, tile) updated ahead, in the order in which gradients land

    # buffers

    def grad_waits(self, unit: int) -> bool:
        """The gradient has a place of its own on the device, where it stays when backward goes on."""
        return self.deferred and unit in self.resident or unit in self.options.late

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

    def guard(self) -> None:
        loss = Access("loss", Buffer(Place.LOSS_HOST), ("loss",), None)
        self.emit(OpKind.GUARD, LaneName.UPDATE, loss, Access("verdict", Buffer(Place.VERDICT), None, ("verdict",)))

    def verdict(self) -> Access:
        return Access("verdict", Buffer(Place.VERDICT), ("verdict",), None)

    def host_norms(self) -> list[Access]:
        return [Access("norms", Buffer(Place.NORM_HOST, key), ("norm", *key), None) for key in sorted(self.norms)]

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
            self.landed(unit, tile.index, self.download(unit, tile.index))

    def landed(self, unit: int, tile: int, landing: Buffer | None) -> None:
        """A tile's gradient is on the host, or is zero: what a step does with it before backward is over."""
        if unit in self.ahead:
            self.update_ahead(unit, tile, landing)
        elif self.deferred:
            pass
        elif unit == self.table:
            self.update_rest(tile, landing)
        else:
            assert landing is not None
            self.update(unit, tile, landing)

    def report(self, unit: int, part: int) -> None:
        self.norms.append((unit, part))
        source = Access("source", Buffer(Place.NORM, (unit, part)), ("norm", unit, part), None)
        target = Access("target", Buffer(Place.NORM_HOST, (unit, part)), None, ("norm", unit, part))
        self.emit(OpKind.REPORT, LaneName.DOWNLOAD, source, target, unit=unit)

    def download(self, unit: int, tile: int) -> Buffer:
        landing = self.landing(unit, tile)
        source = Access("source", self.grad_buffer(unit), ("grad", unit), None)
        target = Access("target", landing, None, ("landed", unit, tile))
        self.emit(OpKind.DOWNLOAD, LaneName.DOWNLOAD, source, target, unit=unit, tile=tile)
        return landing

    def landing(self, unit: int, tile: int) -> Buffer:
        if self.deferred:
            return Buffer(Place.GRAD_HOST, (unit, tile))
        position, self.next_ring = self.next_ring, (self.next_ring + 1) % self.options.ring
        return Buffer(Place.RING, (position,))

    def part(self, unit: int, tile: int) -> int:
        """The norm that a tile's update asks for: of a sliced projection the tile's own, since it leaves first."""
        return FIRST_PART + tile if self.options.sliced_head and unit == self.output else 0

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
            *self.permits(unit, self.part(unit, tile)),
            *self.state(unit, tile, 0, 1),
            unit=unit,
            tile=tile,
        )

    def update_rest(self, tile: int, landing: Buffer | None) -> None:
        grad = () if landing is None else (Access("grad", landing, ("landed", self.table, tile), None),)
        permits = [self.verdict()] if landing is None else self.permits(self.table, self.part(self.table, tile))
        state = self.state(self.table, tile, 0, "rest")
        self.emit(OpKind.UPDATE_REST, LaneName.UPDATE, *grad, *permits, *state, unit=self.table, tile=tile)

    def update_rows(self, tile: int) -> None:
        grad = Access("grad", Buffer(Place.ROW_GRAD_HOST), ("row_grad",), None)
        permits, state = self.permits(self.table, 1), self.state(self.table, tile, "rest", 1)
        self.emit(OpKind.UPDATE_ROWS, LaneName.UPDATE, grad, *permits, *state, unit=self.table, tile=tile)

    def update_table(self, tile: int) -> None:
        accesses = [*self.at_hand(self.table, tile), *self.state(self.table, tile, 0, 1)]
        self.emit(OpKind.UPDATE_TABLE, LaneName.UPDATE, *accesses, unit=self.table, tile=tile)

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
        if unit == self.table:
            accesses.append(self.other_rows(unit, tile))
        if landing is not None:
            part = (unit, self.part(unit, tile))
            norms = Access("norms", Buffer(Place.NORM_HOST, part), ("norm", *part), None)
            accesses += [Access("grad", landing, ("landed", unit, tile), None), norms]
        accesses.append(Access("spare", Buffer(Place.SPARE, (unit, tile)), None, ("spare", unit, tile)))
        self.early.append((unit, tile))
        kind = OpKind.REST_AHEAD if unit == self.table else OpKind.UPDATE_AHEAD
        self.emit(kind, LaneName.UPDATE, *accesses, unit=unit, tile=tile)

    def settle(self, unit: int, tile: int) -> None:
        """The new weights are there, of the table perhaps only those that the next batch's rows read. What else the new
        state has, only `complete` may find before it is whole."""
        accesses = [*self.at_hand(unit, tile), self.spare(unit, tile, "spare", "settled")]
        if unit == self.table:
            accesses.append(self.other_rows(unit, tile, 0, "left"))
        for access in self.state(unit, tile, 0, "settled"):
            new = (str(access.buffer.place), unit, tile, 1)
            accesses.append(access._replace(leaves=new) if access.buffer.place in self.read_places else access)
        kind = OpKind.SETTLE_ROWS if unit == self.table else OpKind.SETTLE
        self.emit(kind, LaneName.UPDATE, *accesses, unit=unit, tile=tile)

    def settle_others(self, tile: int) -> None:
        """Weights that nobody reads yet, beside others of the same tile that the next batch's gather reads already. All
        rows that the batch did not touch have theirs from ahead of the verdict, else `settle` leaves none."""
        unit, spare = self.table, self.spare(self.table, tile, "settled", "settled")._replace(leaves=None)
        accesses = [self.verdict(), self.row_grad(), spare, self.other_rows(unit, tile, "left", 1)]
        for access in self.state(unit, tile, "settled", "settled"):
            new = (str(access.buffer.place), unit, tile, 1)
            read = access.buffer.place in self.read_places
            accesses.append(access._replace(needs=new, leaves=None) if read else access)
        self.emit(OpKind.SETTLE_OTHERS, LaneName.UPDATE, *accesses, unit=unit, tile=tile)

    def complete(self, unit: int, tile: int) -> None:
        accesses = [*self.at_hand(unit, tile), self.spare(unit, tile, "settled", "spent")]
        accesses += [a for a in self.state(unit, tile, "settled", 1) if a.buffer.place not in self.read_places]
        kind = OpKind.COMPLETE_ROWS if unit == self.table else OpKind.COMPLETE
        self.emit(kind, LaneName.UPDATE, *accesses, unit=unit, tile=tile)

    def at_hand(self, unit: int, tile: int) -> list[Access]:
        """The verdict, and all of a tile's gradient, which waits for it."""
        found = [self.verdict()]
        if unit == self.table:
            found.append(self.row_grad())
        if unit != self.table or self.layout.tied:
            found.append(Access("grad", Buffer(Place.GRAD_HOST, (unit, tile)), ("landed", unit, tile), None))
        return found

    def row_grad(self) -> Access:
        return Access("row_grad", Buffer(Place.ROW_GRAD_HOST), ("row_grad",), None)

    def spare(self, unit: int, tile: int, needs: str, leaves: str) -> Access:
        return Access("spare", Buffer(Place.SPARE, (unit, tile)), (needs, unit, tile), (leaves, unit, tile))

    def update_all(self) -> None:
        """In the order in which the next forward needs the units, of the table at first only the rows that it does.
        What it does not read follows, in the order in which the next gradients land where these wait."""
        others = deque(t.index for t in self.layout.tiles(self.table, trained=True) if self.settles_in_two(self.table))
        for unit in range(len(self.layout.units)):
            if self.trained[unit]:
                self.update_unit(unit)
            if unit in self.blocks and self.layout.tied and not self.options.sliced_head:
                first, end = self.output_share(self.blocks.index(unit))
                for _ in range(min(end - first, len(others))):
                    self.settle_others(others.popleft())
        for tile in others:
            self.settle_others(tile)
        for unit, index in self.early:
            self.complete(unit, index)

    def update_unit(self, unit: int) -> None:
        if unit in self.resident:
            self.update_resident_table() if unit == self.table else self.update_resident(unit)
            return
        for tile in self.layout.tiles(unit, trained=True):
            if unit in self.ahead:
                self.settle(unit, tile.index)
            elif unit == self.table:
                self.update_table(tile.index)
            else:
                self.update(unit, tile.index, Buffer(Place.GRAD_HOST, (unit, tile.index)))
