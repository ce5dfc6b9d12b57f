"""The sequential loop, which the engine equals bit for bit, does what plain torch does: the whole Hugging Face model,
autograd through all of it, `clip_grad_norm_` and `torch.optim.AdamW` with two parameter groups.

The same sums in another order differ by roundings, and training amplifies them by as much as the model is ill
conditioned there. So how far two runs may lie apart is measured, not guessed: plain torch runs again from weights moved
by one unit in the last place at random, and the loop may differ from plain torch by a few times what those runs differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.sequential import Sequential
from engine.toys import (
    DEFERRED,
    EAGER,
    LR,
    HookedDevice,
    engine_on,
    plane_of,
    random_weights,
    run_sequential,
    toy_batch,
    toy_decoder,
    toy_options,
    write_weights,
)
from families import FAMILIES
from slideformer.data.batches import MicroBatch
from slideformer.engine import Engine
from slideformer.model.decoder import Decoder
from slideformer.schedule import OpKind

FEW = 6
"""Roundings differ in more places than the weights' last bits: in every sum of the two orders. Measured: up to 2.2
times the spread, over all families, clip norms and tensors below (torch 2.13, AVX-512)."""
ULP = 2.0**-23


@dataclass
class Plain:
    """Weights and moments by name, losses and norms, of a run of plain torch."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, dict[str, torch.Tensor]]


def plain_run(family: str, tied: bool, steps, options, *, moved: int | None = None) -> Plain:
    """moved: a seed; every weight starts one unit in the last place away, or not, at random."""
    decoder = toy_decoder(family, tied=tied)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](tied), dtype=torch.float32, attn_implementation="eager")
    params = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(moved or 0)
    with torch.no_grad():
        for unit, offset, values in random_weights(decoder.layout):
            (name,) = (n for n, o in decoder.layout.units[unit].offsets.items() if o == offset)
            if moved is not None:
                values = values * (1 + ULP * torch.randint(-1, 2, values.shape, generator=generator))
            params[name].copy_(values.view(params[name].shape))
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(options.beta1, options.beta2), eps=options.eps)
    model.eval()
    run = Plain([], [], {"exp_avg": {}, "exp_avg_sq": {}, "weight": params})
    for batch, lr in steps:
        count = sum(int((m.labels[:, 1:] != -100).sum()) for m in batch)
        losses = [model(m.input_ids, labels=m.labels, num_items_in_batch=count).loss for m in batch]
        sum(losses).backward()
        limit = options.max_grad_norm or math.inf
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), limit)))
        run.losses.append(float(sum(loss.detach() for loss in losses)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    for name, param in params.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            run.tensors[moment][name] = optimizer.state[param][moment]
    return run


def sequential_tensors(reference: Sequential) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for index, unit in enumerate(reference.layout.units):
        whole = {
            "weight": reference.flat(index),
            "exp_avg": reference.exp_avg[index],
            "exp_avg_sq": reference.exp_avg_sq[index],
        }
        for param in unit.params:
            part = slice(unit.offsets[param.name], unit.offsets[param.name] + param.numel)
            for name, flat in whole.items():
                found[name][param.name] = flat[part].view(param.shape)
    return found


@pytest.mark.parametrize(
    ("family", "tied", "max_grad_norm"),
    [
        ("llama", True, 1e-3),
        ("llama", False, 1.0),
        ("gpt2", True, 0.0),
        ("gpt2", False, 1e-3),
        ("gemma2", True, 1.0),
        ("phi", False, 0.0),
        ("olmo2", True, 1e-3),
    ],
)
def test_the_sequential_loop_agrees_with_plain_torch(family, tied, max_grad_norm):
    """A learning rate schedule, unequal token counts in three micro-batches, decay on matrices alone."""
    options = toy_options(update="deferred", max_grad_norm=max_grad_norm, micro_batches=3, eps=1e-6)
    batch = toy_batch(3)
    batch[1].labels[:, :9] = -100
    steps = [(batch, LR * scale) for scale in (0.3, 1.0, 0.7, 0.4)]
    reference = Sequential(toy_decoder(family, tied=tied), options)
    write_weights(reference.layout, reference)
    results = [reference.step(b, lr) for b, lr in steps]
    plain = plain_run(family, tied, steps, options)
    moved = [plain_run(family, tied, steps, options, moved=seed) for seed in (1, 2, 3)]

    def tolerance(pick) -> float:
        """Largest difference that moving the weights by an ulp makes, and an ulp of the largest value itself."""
        own = pick(plain)
        return FEW * (max(float((pick(m) - own).abs().max()) for m in moved) + ULP * float(own.abs().max()))

    for index, values in enumerate(zip(*results, strict=True)):
        found = torch.tensor(values, dtype=torch.float64)
        pick = lambda run, index=index: torch.tensor((run.losses, run.norms)[index], dtype=torch.float64)  # noqa: E731
        assert float((found - pick(plain)).abs().max()) <= tolerance(pick)
    assert results[0][0] - results[-1][0] > (0.3 if max_grad_norm != 1e-3 else 0.1)
    for content, by_name in sequential_tensors(reference).items():
        assert set(by_name) == set(plain.tensors[content])
        for name, tensor in by_name.items():
            pick = lambda run, c=content, n=name: run.tensors[c][n].detach()  # noqa: E731
            error = float((tensor - pick(plain)).abs().max())
            assert error <= tolerance(pick), f"{content} of {name}"


def test_the_tolerance_is_tight():
    """What it must see, it sees: a forgotten micro-batch, decay on norms, clipping by another epsilon or not at all."""
    options = toy_options(update="deferred", max_grad_norm=1.0, eps=1e-6)
    steps = [(toy_batch(), LR)] * 3
    plain = plain_run("llama", True, steps, options)
    moved = plain_run("llama", True, steps, options, moved=1)
    others = [
        plain_run("llama", True, [(toy_batch(seed=1), LR)] * 3, options),
        plain_run("llama", True, steps, toy_options(max_grad_norm=1.001, eps=1e-6)),
        plain_run("llama", True, steps, toy_options(max_grad_norm=1.0, eps=1e-6, weight_decay=0.11)),
        plain_run("llama", True, steps, toy_options(max_grad_norm=1.0, eps=1e-6, beta2=0.9991)),
    ]
    for other in others:
        worst = 0.0
        for content in ("weight", "exp_avg", "exp_avg_sq"):
            for name, own in plain.tensors[content].items():
                spread = (moved.tensors[content][name] - own).abs().max() + ULP * own.abs().max()
                apart = (other.tensors[content][name] - own).abs().max() / (FEW * spread)
                worst = max(worst, float(apart.detach()))
        assert worst > 1


# batch shapes


def gradients(engine: Engine) -> list[torch.Tensor]:
    """Of the first step, from the first moments."""
    units = range(len(engine.layout.units))
    return [plane_of(engine.state, unit, "exp_avg") / (1 - engine.options.beta1) for unit in units]


def test_the_same_rows_give_the_same_gradients_in_micro_batches_of_any_size():
    """Four rows with unequal token counts as 4 x 1, 2 x 2 and 1 x 4. fp32: roundings of another order of sums."""
    (batch,) = toy_batch(rows=4)
    for row, first in enumerate((2, 11, 5, 9)):
        batch.labels[row, :first] = -100
    found = []
    for rows in (1, 2, 4):
        pieces = zip(batch.input_ids.split(rows), batch.labels.split(rows), strict=True)
        micro_batches = [MicroBatch(ids, labels) for ids, labels in pieces]
        options = toy_options(**EAGER, micro_batch_size=4, micro_batches=4)
        with engine_on(toy_decoder("qwen3"), options) as engine:
            write_weights(engine.layout, engine)
            result = engine.step(micro_batches, lr=LR)
            result.wait()
            found.append((result.loss, result.grad_norm, gradients(engine)))
    for loss, norm, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-5)
        for grad, expected in zip(grads, found[0][2], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_the_loss_is_a_mean_over_target_tokens_not_over_micro_batches():
    """One token that costs 10 and 99 that cost 1: (10 + 99) / 100. The model's output is its bias alone."""
    dear, cheap, vocab = 7, 8, 307
    bias = torch.full((vocab,), math.log((1 - math.exp(-10) - math.exp(-1)) / (vocab - 2)))
    bias[dear], bias[cheap] = -10.0, -1.0
    one = MicroBatch(torch.full((1, 2), dear), torch.full((1, 2), dear))
    many = MicroBatch(torch.full((1, 100), cheap), torch.full((1, 100), cheap))
    decoder = toy_decoder("phi", tied=False)
    options = toy_options(**EAGER, micro_batch_size=1, max_length=100, micro_batches=2)
    with engine_on(decoder, options) as engine:
        write_weights(engine.layout, engine)
        final, output = len(decoder.layout.units) - 2, decoder.layout.output
        engine.write(output, 0, torch.zeros(decoder.layout.units[output].numel))
        engine.write(final, decoder.layout.units[final].offsets["lm_head.bias"], bias)
        assert engine.step([one, many], lr=LR).loss == pytest.approx(1.09, abs=1e-6)


def test_a_loss_scaled_by_1024_gives_the_same_update_once_clipped():
    """Both runs are clipped; what is left of the scale is clip_grad_norm_'s 1e-6 beside the norm."""
    options = toy_options(update="deferred", max_grad_norm=1e-3, micro_batches=2)
    updates, norms = [], []
    for scale in (1.0, 1024.0):

        def before(number: int, scale: float = scale) -> None:
            op = engine.plan.ops[number]
            if op.kind in (OpKind.REDUCE, OpKind.REDUCE_OUTPUT, OpKind.REDUCE_ROWS):
                engine.executor.buffers[next(a.buffer for a in op.accesses if a.role == "grad")].mul_(scale)

        decoder = toy_decoder(tied=False)
        with engine_on(decoder, options, HookedDevice(before=before)) as engine:
            write_weights(engine.layout, engine)
            start = [engine.read(u, 0, unit.numel) for u, unit in enumerate(decoder.layout.units)]
            result = engine.step(toy_batch(2), lr=LR)
            result.wait()
            norms.append(result.grad_norm)
            updates.append([engine.read(u, 0, w.numel()) - w for u, w in enumerate(start)])
    assert norms[1] == pytest.approx(1024 * norms[0], rel=1e-6)
    for scaled, plain in zip(updates[1], updates[0], strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-5 * LR)


def test_a_tied_table_gets_both_gradients_and_one_pair_of_moments():
    """Untied with two equal matrices, the two gradients add up to the tied one's."""
    options, found = toy_options(**EAGER), {}
    for tied in (True, False):
        decoder = toy_decoder(tied=tied)
        with engine_on(decoder, options) as engine:
            write_weights(engine.layout, engine)
            if not tied:
                engine.write(decoder.layout.output, 0, engine.read(0, 0, decoder.layout.units[0].numel))
            engine.step(toy_batch(), lr=LR).wait()
            found[tied] = gradients(engine)
            moments = [plane_of(engine.state, unit, "exp_avg") for unit in range(len(decoder.layout.units))]
            assert [m.numel() for m in moments] == [unit.train_numel for unit in decoder.layout.units]
    both = found[False][0] + found[False][-1]
    torch.testing.assert_close(found[True][0], both, rtol=1e-5, atol=1e-6 * float(both.abs().max()))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral"])
def test_padding_on_either_side_is_the_same_in_both_attention_implementations(family):
    """At positions that are not padding: the first token after left padding is predicted from padding, so not trained.

    sdpa and eager order their sums differently: they may lie as far apart as eager lies from itself with moved weights.
    """
    ids, labels = toy_batch()[0].input_ids, toy_batch()[0].labels
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4], right[1, -5:] = 0, 0
    batch = [MicroBatch(ids, labels.masked_fill(mask == 0, -100), mask) for mask in (left, right)]
    batch[0].labels[0, 4] = -100
    options = toy_options(**DEFERRED, micro_batches=2)

    def run(implementation: str, moved: int | None) -> tuple[list[torch.Tensor], float]:
        config = FAMILIES[family](True)
        decoder = Decoder(config, dtype=torch.float32, tile_numel=2048, attn_implementation=implementation)
        reference = Sequential(decoder, options)
        generator = torch.Generator().manual_seed(moved or 0)
        for unit, offset, values in random_weights(decoder.layout):
            step = torch.randint(-1, 2, values.shape, generator=generator) if moved is not None else 0
            reference.write(unit, offset, values * (1 + ULP * step))
        loss, _ = reference.step(batch, LR)
        return [m.clone() for m in reference.exp_avg], loss

    (eager, eager_loss), (sdpa, sdpa_loss) = run("eager", None), run("sdpa", None)
    moved = [run("eager", seed) for seed in (1, 2, 3)]
    assert abs(sdpa_loss - eager_loss) <= FEW * (max(abs(m[1] - eager_loss) for m in moved) + ULP * eager_loss)
    for unit, gradient in enumerate(eager):
        spread = max(float((m[0][unit] - gradient).abs().max()) for m in moved)
        allowed = FEW * (spread + ULP * float(gradient.abs().max()))
        assert float((sdpa[unit] - gradient).abs().max()) <= allowed


def test_what_lies_at_padding_positions_does_not_matter():
    """Other tokens there, and only the rows of the table that they themselves touch change."""
    ids, labels = toy_batch()[0].input_ids, toy_batch()[0].labels
    right = torch.ones_like(ids)
    right[1, -5:] = 0
    other = torch.where(right == 0, 7, ids)
    labels = labels.masked_fill(right == 0, -100)
    for tied in (True, False):
        outcomes = [
            run_sequential(toy_decoder(tied=tied), toy_options(**EAGER), [([MicroBatch(i, labels, right)], LR)])
            for i in (ids, other)
        ]
        assert outcomes[0].losses == outcomes[1].losses
