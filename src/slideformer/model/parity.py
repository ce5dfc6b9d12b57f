"""Before any training: does the model, run unit by unit, compute what the model's own forward computes?

A small copy of the model with random weights is run both ways, on the CPU in fp32, and logits, loss and gradients are
compared. What the engine would silently do otherwise (a factor left out, another mask, a lost gradient) shows here.

The copy keeps what decides how glue and blocks work: the model class, the pattern of block types (cut to the shortest
start of it that has every type), the head size and so the rotary tables, the scales, the caps. It shrinks what only
costs time: vocabulary, MLP, and heads and hidden size by a common factor. A sliding window becomes shorter than the
sequence, so that it matters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import gcd, sqrt

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slideformer.layout import UnitKind
from slideformer.model.build import refuse_config
from slideformer.model.decoder import Decoder, ModelRefused

_VOCAB, _MLP, _WINDOW = 97, 128, 4
_MLP_NAMES = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_BATCH, _LENGTH, _PADDED = 2, 12, 5  # the second row ends in padding


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference found in anything compared, relative to the largest value in it, and what is allowed."""

    worst: float
    where: str
    tolerance: float


def check_parity(
    config: PretrainedConfig, *, attn_implementation: str = "auto", disable_dropout: bool = False
) -> Parity:
    """Compare the two ways to run a small copy of the model of `config`.

    Raises ModelRefused if they differ beyond rounding, or the copy cannot be built or run.
    """
    refuse_config(copy.deepcopy(config), disable_dropout=disable_dropout)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, decoder = _build_small(config, attn_implementation, disable_dropout)
        tolerance = _tolerance(decoder)
        try:
            found = [_compare(model, decoder, padded=padded) for padded in (False, True)]
        except (RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise ModelRefused(
                f"{config.model_type} cannot be run unit by unit ({type(error).__name__}: {error}): choose another "
                "model."
            ) from error
    differences = dict(found[0] + found[1])
    for where, difference in differences.items():
        if not difference <= tolerance:  # NaN is no agreement
            raise ModelRefused(
                f"{config.model_type}, run unit by unit, does not compute what the model's own forward does: {where} "
                f"differs by {difference:.2g} of its largest value, rounding explains {tolerance:.2g}; it would be "
                "trained wrong: choose another model."
            )
    where = max(differences, key=differences.__getitem__)
    return Parity(differences[where], where, tolerance)


def _tolerance(decoder: Decoder) -> float:
    """Both ways run the same fp32 operations; only the order inside sums may differ.

    Reordering n terms moves a sum by about sqrt(n) * 2^-24 of their norm. A block has about 8 sums in a row, of at most
    n = the widest matrix; errors add up along the blocks; twice for the way back; twice again for padding (other sums).
    """
    widest = max(max(p.shape) for u in decoder.layout.units if u.kind is UnitKind.BLOCK for p in u.params)
    return 2**-24 * sqrt(widest) * 8 * len(decoder.layout.blocks) * 2 * 2


def small_copy(config: PretrainedConfig, *, shrink: bool = True) -> PretrainedConfig:
    """The config of the copy. shrink: also divide heads and hidden size, which not every config allows."""
    config = copy.deepcopy(config)
    count = config.num_hidden_layers
    per_block = {n: v for n, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == count}
    kinds = [repr(kind) for kind in zip(*per_block.values(), strict=True)] or [""] * count
    keep = next(n for n in range(min(2, count), count + 1) if set(kinds[:n]) == set(kinds))
    for name, value in per_block.items():
        setattr(config, name, value[:keep])
    config.num_hidden_layers = keep

    config.vocab_size = min(config.vocab_size, _VOCAB)
    limits = {"sliding_window": _WINDOW} | dict.fromkeys(_MLP_NAMES, _MLP)
    limits |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), config.vocab_size - 1)
    for name, limit in limits.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > limit:
            setattr(config, name, limit)
    if shrink:
        _divide_heads(config)
    return config


def _divide_heads(config: PretrainedConfig) -> None:
    """Divide hidden size and heads by one number, so that head size and grouping stay; at least 2 groups stay."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    common = gcd(heads, groups, config.hidden_size)
    factor = max(f for f in range(1, common + 1) if common % f == 0 and (f == 1 or groups // f >= 2))
    config.hidden_size //= factor
    config.num_attention_heads = heads // factor
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = groups // factor


def _build_small(
    config: PretrainedConfig, attn_implementation: str, disable_dropout: bool
) -> tuple[PreTrainedModel, Decoder]:
    error: Exception | None = None
    for shrink in (True, False):
        try:
            decoder = Decoder(
                small_copy(config, shrink=shrink),
                dtype=torch.float32,
                tile_numel=1 << 20,
                attn_implementation=attn_implementation,
                disable_dropout=disable_dropout,
            )
            model = AutoModelForCausalLM.from_config(
                decoder.module_config, dtype=torch.float32, attn_implementation=decoder.attn_implementation
            )
            break
        except Exception as found:  # of any kind: not every config can be shrunk
            error = found
    else:
        if isinstance(error, ModelRefused):
            raise error
        raise ModelRefused(
            f"{config.model_type}: a small copy for the parity check cannot be built ({error}), so it is unknown "
            "whether it would be trained right: choose another model."
        ) from error
    with torch.no_grad():
        for param in model.parameters():
            # Scores, norms and biases far from trivial, so that a wrong mask, rotation or scale is seen.
            noise = torch.randn_like(param)
            param.copy_(noise / sqrt(min(param.shape)) if param.ndim > 1 else param + 0.1 * noise)
    return model.eval(), decoder


def _compare(model: PreTrainedModel, decoder: Decoder, *, padded: bool) -> list[tuple[str, float]]:
    """Name and relative difference of the logits at target positions, the loss, and every gradient."""
    padding = decoder.padding_idx or 0
    ids = torch.randint(1, decoder.vocab_size - 1, (_BATCH, _LENGTH))
    mask = torch.ones_like(ids)
    if padded:
        ids[1, -_PADDED:], mask[1, -_PADDED:] = padding, 0
    labels = ids.masked_fill(mask == 0, -100)

    model.zero_grad(set_to_none=True)
    own = model(input_ids=ids, labels=labels, attention_mask=mask if padded else None, use_cache=False)
    own.loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    logits, loss = _unit_by_unit(decoder, params, ids, labels)
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()), allow_unused=True), strict=True))

    suffix = " (right-padded batch)" if padded else ""
    real = mask.bool()
    found = [
        ("logits" + suffix, _difference(logits[real], own.logits[real])),
        ("loss" + suffix, _difference(loss, own.loss)),
    ]
    # Some gradients are zero by symmetry (of a key bias, for one) and consist of rounding alone.
    floor = max(g.abs().max().item() for g in expected.values() if g is not None) * 2**-10
    return found + [(f"the gradient of {n}{suffix}", _difference(grads[n], expected[n], floor)) for n in params]


def _difference(a: torch.Tensor | None, b: torch.Tensor | None, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest value of b but at least to `floor`."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    difference, largest = (a - b).abs().max().item(), max(b.abs().max().item(), floor)
    return difference / largest if largest else (0.0 if difference == 0 else float("inf"))


def _unit_by_unit(
    decoder: Decoder, params: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = decoder.layout
    table = params[layout.units[0].params[0].name]
    used = ids.unique().flip(0)  # in descending order, so that no row stays where it was
    remapped = len(used) - 1 - torch.searchsorted(used.flip(0), ids)
    at = [] if decoder.padding_idx is None else (used == decoder.padding_idx).nonzero().flatten().tolist()
    glue = layout.find(UnitKind.GLUE)
    names = [] if glue is None else [p.name for p in layout.units[glue].params]
    hidden, call = decoder.embed(
        table[used], {n: params[n] for n in names}, remapped, padding_row=at[0] if at else None
    )
    for unit in layout.blocks:
        hidden = decoder.forward(unit, params, hidden, call)
    projection = decoder.projection
    weight = params[layout.units[layout.output].params[0].name]
    logits = projection.logits(decoder.final(params, hidden), weight, params.get(projection.bias))
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
