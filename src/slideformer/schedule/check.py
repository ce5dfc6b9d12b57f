"""Proves a plan before it runs. Shares no code with the file that derives the waits.

Order: every pair of accesses to one buffer of which one writes is ordered by lane order and waits, within a run and
across the boundary to the run before. Contents: run one op after the other, every op finds in each buffer what it
needs, and the state ends as it should. Declarations: every op declares what its kind must touch.
With these three, any execution that respects lanes and waits equals the sequential one.
"""

from __future__ import annotations

from collections import Counter

from slideformer.layout import Layout, UnitKind
from slideformer.schedule.ops import STATE_PLACES, Buffer, Content, Op, OpKind, Plan
from slideformer.schedule.options import StepOptions, Update


class PlanError(AssertionError):
    """The plan is wrong. Names the op and the buffer. Always a defect of the program, never of its user."""


def prove(plan: Plan, layout: Layout, options: StepOptions) -> None:
    """Raise PlanError unless order, contents and declarations hold for a first run and for runs that join."""
    _prove_declarations(plan, layout, options)
    _prove_contents(plan, layout)
    _prove_order(plan)


def _prove_order(plan: Plan) -> None:
    """Two runs, one behind the other. reach[i] has bit j set when op j is certainly done before op i starts."""
    num_ops = len(plan.ops)
    if len(plan.waits) != num_ops:
        raise PlanError(f"{len(plan.waits)} lists of waits for {num_ops} ops")
    reach: list[int] = []
    lane_last: dict[str, int] = {}
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    for index in range(2 * num_ops):
        op = plan.ops[index % num_ops]
        sources = [index - index % num_ops - w.age * num_ops + w.index for w in plan.waits[index % num_ops]]
        if op.lane in lane_last:
            sources.append(lane_last[op.lane])
        known = 0
        for source in sources:
            if source >= index:
                raise PlanError(f"{op} waits for {plan.ops[source % num_ops]}, which comes after it")
            if source >= 0:
                known |= reach[source] | 1 << source
        reach.append(known)
        lane_last[op.lane] = index
        for access in op.accesses:
            before = [writer[access.buffer]] if access.buffer in writer else []
            if access.leaves is not None:
                before += readers.get(access.buffer, [])
            for other in before:
                if not known >> other & 1 and other != index:
                    raise PlanError(
                        f"{op} (lane {op.lane}) and {plan.ops[other % num_ops]} (lane {plan.ops[other % num_ops].lane})"
                        f" both touch {access.buffer}, and nothing orders them"
                    )
        for access in op.accesses:
            if access.leaves is not None:
                writer[access.buffer], readers[access.buffer] = index, []
            else:
                readers.setdefault(access.buffer, []).append(index)


def _prove_contents(plan: Plan, layout: Layout) -> None:
    holds: dict[Buffer, Content] = {}
    for access in (a for op in plan.ops for a in op.accesses if a.buffer.place in STATE_PLACES):
        holds[access.buffer] = (str(access.buffer.place), *access.buffer.index, 0)
    for op in plan.ops:
        for access in op.accesses:
            if access.needs is not None and holds.get(access.buffer) != access.needs:
                found = holds.get(access.buffer, "nothing")
                raise PlanError(f"{op} needs {access.needs} in {access.buffer}, but finds {found}")
        for access in op.accesses:
            if access.leaves is not None:
                holds[access.buffer] = access.leaves
    for index, unit in enumerate(layout.units):
        trained_tiles = len(layout.tiles(index, trained=True)) if plan.trains else 0
        for tile in range(len(layout.tiles(index))):
            for place in STATE_PLACES:
                buffer = Buffer(place, (index, tile))
                version = 1 if tile < trained_tiles else 0
                if holds.get(buffer, (str(place), index, tile, 0)) != (str(place), index, tile, version):
                    raise PlanError(f"{unit.name} tile {tile}: {place} ends as {holds[buffer]}, not version {version}")


def _prove_declarations(plan: Plan, layout: Layout, options: StepOptions) -> None:
    for op in plan.ops:
        required = _required(op, layout, options)
        declared = Counter(a.role for a in op.accesses)
        if declared != required:
            missing, extra = required - declared, declared - required
            raise PlanError(f"{op} must declare {dict(required)}: missing {dict(missing)}, not expected {dict(extra)}")
        if len({a.buffer for a in op.accesses}) != len(op.accesses):
            raise PlanError(f"{op} declares one buffer twice")


def _required(op: Op, layout: Layout, options: StepOptions) -> Counter[str]:
    """The roles that an op of this kind must declare, stated a second time and independently of the program."""
    trained = [u.train_numel > 0 for u in layout.units]
    glue, final = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
    eager, block = options.update is Update.EAGER, op.unit in layout.blocks
    separate = not options.fp32_compute and (not block or options.micro_batches > 1)
    planes = ["weight", "residual"] if options.fp32_compute else ["weight"]
    state = ["weight", "residual", "moments"]
    permits = ["verdict", "norms"] if eager else ["verdict"]
    around = ["rows"] + (["glue"] if glue is not None else [])
    head = ["batch", "output", "input", "loss"] + (["final"] if final is not None else [])
    below = any(trained[u] for u in (0, *layout.blocks)) or (glue is not None and trained[glue])
    num_norms = sum(trained) + (1 if layout.tied and trained[0] else 0)
    num_table_tiles = len(layout.tiles(0))
    tied_rest = ["grad", *permits] if layout.tied else ["verdict"]
    sums = ["sum", "grad"] if separate else ["grad"]
    roles: dict[OpKind, list[str]] = {
        OpKind.LOAD: ["batch"],
        OpKind.GATHER: planes * num_table_tiles + ["rows"],
        OpKind.UPLOAD_ROWS: ["source", "target"],
        OpKind.UPLOAD: [*planes, "target"],
        OpKind.EMBED: ["batch", "call", "hidden", *around],
        OpKind.FORWARD: ["weights", "call", "input", "hidden"],
        OpKind.SPILL: ["source", "target"],
        OpKind.FETCH: ["source", "target"],
        OpKind.HEAD_LOSS: head,
        OpKind.HEAD: head
        + (["hidden_grad"] if below else [])
        + (["output_grad"] if trained[layout.output] else [])
        + (["final_grad"] if final is not None and trained[final] else []),
        OpKind.BACKWARD: ["weights", "call", "input", "hidden_grad"] + (["grad"] if trained[op.unit] else []),
        OpKind.EMBED_BACKWARD: ["batch", "hidden_grad", *around]
        + (["row_grad"] if trained[0] else [])
        + (["glue_grad"] if glue is not None and trained[glue] else []),
        OpKind.REDUCE: [*sums, "norm"],
        OpKind.REDUCE_OUTPUT: [*sums, "norm"] + (["batch", "row_grad"] if layout.tied else []),
        OpKind.REDUCE_ROWS: [*sums, "norm"],
        OpKind.REPORT: ["source", "target"],
        OpKind.REPORT_LOSS: ["source", "target"],
        OpKind.DOWNLOAD: ["source", "target"],
        OpKind.DOWNLOAD_ROWS: ["source", "target"],
        OpKind.GUARD: ["loss", "verdict"],
        OpKind.DECIDE: ["loss", "verdict"] + ["norms"] * num_norms,
        OpKind.TOTAL: ["verdict"] + ["norms"] * num_norms,
        OpKind.RESULT: ["loss"],
        OpKind.UPDATE: ["grad", *permits, *state],
        OpKind.UPDATE_REST: [*tied_rest, *state],
        OpKind.UPDATE_ROWS: ["grad", *permits] + state * num_table_tiles,
    }
    return Counter(roles[op.kind])
