"""Programs in which every kind of op can go wrong, and every door that must say so afterwards."""

from __future__ import annotations

from collections.abc import Callable

from engine.toys import DEFERRED, DISK_DIR, EAGER, LR, on_disk, plans_of, tiny_batch, tiny_decoder, toy_options
from slideformer.engine import Engine
from slideformer.schedule import OpKind, Plan

SPILLING = {"saved_on_device": 1, "hidden_ring": 2, "micro_batches": 2}
SETTINGS = {
    "eager": {**EAGER, **SPILLING},
    "deferred": {**DEFERRED, **SPILLING},
    "ahead, clipped": {**DEFERRED, **SPILLING, "ahead": (0, 1, 2)},
    "sliced head": {**EAGER, **SPILLING, "sliced_head": True},
    "disk": {
        **EAGER,
        **SPILLING,
        "disk": on_disk(tiny_decoder(blocks=2)),
        "disk_ring": 1,
        "saved_on_disk": 99,
        "saved_on_device": 0,
        "offload_dir": DISK_DIR,
    },
    "resident": {**DEFERRED, **SPILLING, "resident": (0, 1, 2, 3), "keep": (1,)},
}
STEP, EVALUATION = 0, 1


class Boom(Exception):
    pass


def decoder():
    return tiny_decoder(blocks=2, tile=300)


def plan_of(program: str, which: int) -> Plan:
    options, model = toy_options(**SETTINGS[program]), decoder()
    return plans_of(model.layout, options, model.dtype)[which]


def first_of_each_kind(plan: Plan) -> dict[OpKind, int]:
    return {op.kind: i for i, op in reversed(list(enumerate(plan.ops)))}


def doors(engine: Engine) -> list[Callable[[], object]]:
    return [lambda: engine.step(tiny_batch(2), lr=LR), lambda: engine.evaluate(tiny_batch(2)), engine.synchronize]
