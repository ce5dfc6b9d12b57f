"""A model run unit by unit, sequentially, on flat vectors: what the engine does, without lanes, slots or stores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from slideformer.layout import UnitKind
from slideformer.model.decoder import Decoder


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    grads: dict[str, torch.Tensor]


def flats_of(decoder: Decoder, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """One flat vector per unit, filled from a state dict."""
    flats = []
    for index, unit in enumerate(decoder.layout.units):
        flat = torch.full((unit.numel,), float("nan"), dtype=decoder.dtype)
        for name, view in decoder.views(index, flat).items():
            view.copy_(weights[name])
        flats.append(flat)
    return flats


def gather(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> tuple[torch.Tensor, ...]:
    """Rows of the ids in descending order (so that no id stays where it was), remapped ids, the padding token's row."""
    used = ids.unique().flip(0)
    remapped = len(used) - 1 - torch.searchsorted(used.flip(0), ids)
    assert torch.equal(used[remapped], ids)
    found = [] if padding_idx is None else (used == padding_idx).nonzero().flatten().tolist()
    return used, table[used].clone(), remapped, found[0] if found else None


def causal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over target tokens, as transformers computes it: shifted by one, in fp32."""
    shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), shifted, ignore_index=-100)


def run_units(
    decoder: Decoder,
    flats: list[torch.Tensor],
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> Result:
    """Loss, logits and the gradient of every trainable parameter by name; gradients land in flat vectors."""
    layout = decoder.layout
    grads = [torch.zeros(u.train_numel, dtype=decoder.dtype) for u in layout.units]
    glue_unit, final_unit = layout.find(UnitKind.GLUE), layout.find(UnitKind.FINAL)
    table = flats[0].view(layout.units[0].params[0].shape)
    used, rows, ids, padding_row = gather(table, input_ids, decoder.padding_idx)
    more = {"padding_row": padding_row, "attention_mask": attention_mask, "position_ids": position_ids}

    def embed(requires_grad: bool):
        leaf = rows.detach().requires_grad_(requires_grad and layout.units[0].params[0].trainable)
        glue = {} if glue_unit is None else decoder.views(glue_unit, flats[glue_unit], requires_grad=requires_grad)
        return leaf, glue, *decoder.embed(leaf, glue, ids, **more)

    inputs = []
    with torch.no_grad():
        _, _, hidden, call = embed(False)
        for unit in layout.blocks:
            inputs.append(hidden)
            hidden = decoder.forward(unit, decoder.views(unit, flats[unit]), hidden, call)

    final = {} if final_unit is None else decoder.views(final_unit, flats[final_unit], requires_grad=True)
    output_flat = flats[layout.output].view(decoder.vocab_size, decoder.hidden_size)
    weight = output_flat.detach().requires_grad_(layout.units[layout.output].params[0].trainable)
    leaf = hidden.detach().requires_grad_()
    bias = decoder.projection.bias
    logits = decoder.projection.logits(decoder.final(final, leaf), weight, None if bias is None else final[bias])
    loss = causal_loss(logits, labels)
    wanted = [leaf, *([weight] if weight.requires_grad else []), *(v for v in final.values() if v.requires_grad)]
    hidden_grad, *found = torch.autograd.grad(loss, wanted)
    if weight.requires_grad:
        grads[layout.output] += found.pop(0).flatten()
    if final_unit is not None:
        _store(decoder, final_unit, final, found, grads[final_unit])

    for unit, saved in zip(reversed(layout.blocks), reversed(inputs), strict=True):
        leaf = saved.detach().requires_grad_()
        params = decoder.views(unit, flats[unit], requires_grad=True)
        output = decoder.forward(unit, params, leaf, call)
        trained = [v for v in params.values() if v.requires_grad]
        hidden_grad, *found = torch.autograd.grad(output, [leaf, *trained], hidden_grad)
        _store(decoder, unit, params, found, grads[unit])

    leaf, glue, hidden, _ = embed(True)
    wanted = [*([leaf] if leaf.requires_grad else []), *(v for v in glue.values() if v.requires_grad)]
    if wanted:
        found = list(torch.autograd.grad(hidden, wanted, hidden_grad))
        if leaf.requires_grad:
            grads[0].view(table.shape)[used] += found.pop(0)
        if glue_unit is not None:
            _store(decoder, glue_unit, glue, found, grads[glue_unit])

    named: dict[str, torch.Tensor] = {}
    for index, unit in enumerate(layout.units):
        for param in unit.params:
            if param.trainable:
                start = unit.offsets[param.name]
                named[param.name] = grads[index][start : start + param.numel].view(param.shape)
    return Result(loss.detach(), logits.detach(), named)


def _store(decoder: Decoder, unit: int, params: dict, found: list[torch.Tensor], flat: torch.Tensor) -> None:
    trained = [n for n, v in params.items() if v.requires_grad]
    for name, grad in zip(trained, found, strict=True):
        start = decoder.layout.units[unit].offsets[name]
        flat[start : start + grad.numel()] += grad.flatten()


def run_whole(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, **more: torch.Tensor) -> Result:
    """The model's own forward and backward."""
    model.zero_grad(set_to_none=True)
    output = model(input_ids=input_ids, labels=labels, use_cache=False, **more)
    output.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Result(output.loss.detach(), output.logits.detach(), grads)
