"""Toy models, batches and weights, the engine and the reference on them, and a device that can be told to misbehave."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from transformers import LlamaConfig

from engine.sequential import Sequential
from families import FAMILIES, VOCAB
from slideformer.data.batches import MicroBatch
from slideformer.device.cpu import CpuDevice, CpuLane
from slideformer.engine import Engine, EngineOptions
from slideformer.engine.options import CONTENTS
from slideformer.layout import Layout
from slideformer.memory import State
from slideformer.model.decoder import Decoder
from slideformer.schedule import Plan, build_evaluation, build_step

ROWS, LENGTH = 2, 12
LR = 1.3e-2
EAGER = {"update": "eager", "max_grad_norm": 0.0}
DEFERRED = {"update": "deferred", "max_grad_norm": 0.5}  # gradients of the toys have norms of 3 to 6, so this clips
TINY_VOCAB = 37
PLANES = ("weight", "residual", "exp_avg", "exp_avg_sq")
DISK_DIR = str(Path(tempfile.gettempdir()) / f"slideformer-tests-{os.getpid()}")
"""For one engine at a time: each takes the folder away when it closes."""

Step = tuple[Sequence[MicroBatch], float]


def toy_options(**changes) -> EngineOptions:
    """For batches of ROWS x LENGTH."""
    sizes = {"micro_batch_size": ROWS, "max_length": LENGTH, "weight_decay": 0.1, "cpu_threads": 2}
    return EngineOptions(**{**sizes, **changes})


def toy_decoder(
    family: str = "llama",
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    tile: int = 5000,
    frozen: tuple[str, ...] = (),
) -> Decoder:
    return Decoder(FAMILIES[family](tied), dtype=dtype, tile_numel=tile, frozen=frozen)


def tiny_decoder(
    *, tied: bool = True, dtype: torch.dtype = torch.float32, tile: int = 200, blocks: int = 3, **changes
) -> Decoder:
    """A model whose step takes a few milliseconds: 16 wide, 37 words."""
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    return Decoder(config, dtype=dtype, tile_numel=tile, **changes)


def toy_batch(
    micro_batches: int = 1, *, rows: int = ROWS, length: int = LENGTH, seed: int = 0, vocab: int = VOCAB
) -> list[MicroBatch]:
    """Random tokens. The first row of each micro-batch has a prompt, each of another length, that is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for micro in range(micro_batches):
        ids = torch.randint(6, vocab, (rows, length), generator=generator)
        labels = ids.clone()
        labels[0, : min(3 + micro, length - 2)] = -100
        batch.append(MicroBatch(ids, labels))
    return batch


tiny_batch = partial(toy_batch, vocab=TINY_VOCAB)


def random_weights(layout: Layout, seed: int = 0) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(unit, offset, values) of every parameter: matrices around 0, norms around 1, every value different."""
    generator = torch.Generator().manual_seed(seed)
    by_name = {}
    for unit in layout.units:  # in the order of names, so that freezing, which reorders, changes no value
        for param in sorted(unit.params, key=lambda p: p.name):
            values = torch.randn(param.numel, generator=generator) * 0.05
            by_name[param.name] = values if len(param.shape) > 1 else values + ("bias" not in param.name)
    for index, unit in enumerate(layout.units):
        for param in unit.params:
            yield index, unit.offsets[param.name], by_name[param.name]


def write_weights(layout: Layout, *targets: Engine | Sequential, seed: int = 0) -> None:
    for unit, offset, values in random_weights(layout, seed):
        for target in targets:
            target.write(unit, offset, values)


@dataclass(frozen=True)
class Outcome:
    """What came of some steps: loss and gradient norm of each, and a hash of every unit's planes and moments."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: dict[str, str]

    @property
    def fall(self) -> float:
        return self.losses[0] - self.losses[-1]


def plane_of(state: State, unit: int, plane: str) -> torch.Tensor:
    """All of it, on the host."""
    return state.part(unit, plane, 0, state.extent(unit, plane)[0])


def state_hashes(owner: Engine | Sequential) -> dict[str, str]:
    """One hash per unit and content."""
    layout, dtype = owner.layout, owner.decoder.dtype
    state = owner.state if isinstance(owner, Engine) else None
    hashes = {}
    for index, unit in enumerate(layout.units):
        if state is None:
            tensors = [owner.weight[index], owner.residual[index], owner.exp_avg[index], owner.exp_avg_sq[index]]
        else:
            tensors = [plane_of(state, index, name) for name in PLANES]
        if dtype is torch.bfloat16:  # the engine keeps no residual of what is frozen
            tensors[1] = tensors[1][: unit.train_numel]
        for name, tensor in zip(PLANES, tensors, strict=True):
            content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            hashes[f"{unit.name} {name}"] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return hashes


def on_disk(
    decoder: Decoder, contents: Sequence[str] = CONTENTS, units: Iterable[int] | None = None
) -> tuple[tuple[str, int], ...]:
    """Pairs for EngineOptions.disk. units: all of them, if not said otherwise."""
    chosen = range(len(decoder.layout.units)) if units is None else units
    return tuple((content, unit) for content in contents for unit in chosen)


def run_sequential(decoder: Decoder, options: EngineOptions, steps: Sequence[Step], *, seed: int = 0) -> Outcome:
    reference = Sequential(decoder, options)
    write_weights(decoder.layout, reference, seed=seed)
    results = [reference.step(batch, lr) for batch, lr in steps]
    return Outcome(*zip(*results, strict=True), state=state_hashes(reference))


def run_engine(engine: Engine, steps: Sequence[Step], *, seed: int = 0) -> Outcome:
    """All steps are submitted before the first result is read, so they join wherever their plans are the same."""
    write_weights(engine.layout, engine, seed=seed)
    results = [engine.step(batch, lr=lr) for batch, lr in steps]
    losses, norms = tuple(r.loss for r in results), tuple(r.grad_norm for r in results)
    engine.synchronize()
    return Outcome(losses, norms, state_hashes(engine))


@contextmanager
def engine_on(decoder: Decoder, options: EngineOptions, device: CpuDevice | None = None) -> Iterator[Engine]:
    """An engine on a device that poisons what is free and delays every piece of work."""
    with device or CpuDevice(jitter_s=5e-4, poison=True) as opened, Engine(decoder, opened, options) as engine:
        yield engine


def plans_of(layout: Layout, options: EngineOptions, dtype: torch.dtype) -> list[Plan]:
    """A training step and an evaluation, with the most micro-batches and with one, as an engine plans them."""
    full = options.step_options(layout, dtype)
    counts = sorted({options.micro_batches, 1}, reverse=True)
    return [build(layout, replace(full, micro_batches=m)) for m in counts for build in (build_step, build_evaluation)]


def use_plan(engine: Engine, plan: Plan) -> None:
    """Put an unproven plan in the place of the one the engine has for as many micro-batches."""
    key = (plan.trains, 1 + max(op.micro for op in plan.ops))
    assert key in engine._plans
    engine._plans[key] = plan


def repeated(batch: Sequence[MicroBatch], steps: int = 5) -> list[Step]:
    """One batch again and again, the learning rate a little lower each time."""
    return [(batch, LR * (1 - 0.05 * i)) for i in range(steps)]


@cache
def reference(
    family: str, tied: bool, dtype: torch.dtype, micro_batches: int, max_grad_norm: float, frozen: tuple[str, ...] = ()
) -> Outcome:
    """Five steps on one batch. Independent of every setting that must not matter."""
    options = toy_options(micro_batches=micro_batches, max_grad_norm=max_grad_norm)
    decoder = toy_decoder(family, tied=tied, dtype=dtype, frozen=frozen)
    return run_sequential(decoder, options, repeated(toy_batch(micro_batches)))


class HookedDevice(CpuDevice):
    """Calls `before` and `after` around each piece of work, in its lane, with its number: how many were queued before
    it in all lanes together, which is program order. `on_queue` is called in the caller."""

    def __init__(
        self,
        *,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int], None] = lambda number: None,
        on_queue: Callable[[int], None] = lambda number: None,
        **settings,
    ) -> None:
        super().__init__(**settings)
        self.before, self.after, self.on_queue = before, after, on_queue
        self.numbers = itertools.count()

    def lane(self, name: str, *, host: bool) -> CpuLane:
        lane = super().lane(name, host=host)
        queue = lane.run

        def run(work: Callable[[], None], label: str = ""):
            if label == "idle":
                return queue(work, label)
            number = next(self.numbers)
            self.on_queue(number)

            def hooked() -> None:
                self.before(number)
                try:
                    work()
                finally:
                    self.after(number)

            return queue(hooked, label)

        lane.run = run
        return lane
