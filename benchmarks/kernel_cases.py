"""What benchmarks/kernels.py measures: per op, its inputs at a model's shape and the implementations that do it.

An implementation is forward and backward of one op, called over and over on the same inputs, which `prepare` makes
whole again before each call (some write over them). Liger's are left out where liger-kernel is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, util
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from slideformer.kernels.device_update import squared_norm_, update_
from slideformer.kernels.glu import glu
from slideformer.kernels.linear_cross_entropy import SlicedLoss, Softmax, loss_and_grads
from slideformer.kernels.rms_norm import add_rms_norm, rms_norm
from slideformer.kernels.rotary import rotary_
from slideformer.model.decoder import Decoder
from slideformer.model.packed_attention import packing_of
from slideformer.model.tail import _graph_only
from slideformer.optim import Hyper, reference_update, split

HYPER = Hyper(1e-4, weight_decay=0.1, step=10)


@dataclass
class Op:
    """nbytes: what must be read and written at least; flops: of matrix products; the other one is None."""

    name: str
    detail: str
    nbytes: int | None
    flops: int | None
    pristine: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # an input, and what it is before each call
    impls: dict[str, Callable[[], object]] = field(default_factory=dict)
    compared: bool = False  # implementations return the same tensors, so the first one's are a reference for the others
    reference: list[Tensor] | None = None

    def off_by(self, found: object) -> float | None:
        """Largest relative distance of a tensor of `found` from that of the first implementation; None: no such."""
        if not self.compared:
            return None
        if self.reference is None:
            self.reference = [t.cpu() for t in found]
        pairs = zip(found, self.reference, strict=True)
        return max(float((t.cpu().float() - of.float()).norm() / of.float().norm()) for t, of in pairs)

    def keep(self, *tensors: Tensor) -> None:
        self.pristine += [(t, t.detach().clone()) for t in tensors]

    @torch.no_grad()
    def prepare(self) -> None:
        for tensor, value in self.pristine:
            tensor.copy_(value)

    def close(self) -> None:
        self.reference = None
        self.pristine.clear()
        self.impls.clear()


class Inputs:
    """Random tensors of one shape's sizes. tokens = batch x seq."""

    def __init__(self, config: PretrainedConfig, batch: int, seq: int, device: torch.device) -> None:
        self.config, self.batch, self.seq, self.device = config, batch, seq, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.generator = torch.Generator(device).manual_seed(0)
        self.liger = util.find_spec("liger_kernel") is not None and device.type == "cuda"

    def randn(self, *shape: int, leaf: bool = False) -> Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(self.dtype)
        return made.requires_grad_(leaf)


def _gradients(run: Callable[[], Tensor | tuple[Tensor, ...]], leaves: list[Tensor], grads: list[Tensor]) -> object:
    out = run()
    return torch.autograd.grad(list(out) if isinstance(out, tuple) else [out], leaves, grads)


def _add(op: Op, name: str, run: Callable[[], object], leaves: list[Tensor], grads: list[Tensor]) -> None:
    op.impls[name] = partial(_gradients, run, leaves, grads)


def norm(inputs: Inputs, *, heads: int | None = None) -> Op:
    """RMSNorm of the hidden states, or of the query's heads."""
    width = inputs.config.hidden_size if heads is None else inputs.config.head_dim
    shape = (inputs.batch, inputs.seq, *([] if heads is None else [heads]), width)
    x, weight, grad = inputs.randn(*shape, leaf=True), inputs.randn(width, leaf=True), inputs.randn(*shape)
    op = Op("rms_norm", "x".join(map(str, shape)), 5 * x.nbytes, None)
    op.keep(x, grad)
    module = LlamaRMSNorm(width, eps=1e-6).to(inputs.device)
    module.weight = torch.nn.Parameter(weight.detach())
    own = [x, module.weight]
    _add(op, "eager", lambda: module(x), own, [grad])
    compiled = torch.compile(module, dynamic=False)
    _add(op, "compile", lambda: compiled(x), own, [grad])
    if inputs.liger:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        _add(op, "liger", lambda: LigerRMSNormFunction.apply(x, weight, 1e-6), [x, weight], [grad])
    ours = partial(rms_norm, x, weight, eps=1e-6, round_first=True, overwrite_grad=True)
    _add(op, "ours", ours, [x, weight], [grad])
    return op


def residual(inputs: Inputs) -> Op:
    """An addition, the norm of the sum, and in backward the sum's other gradient."""
    shape = (inputs.batch, inputs.seq, inputs.config.hidden_size)
    x, add = inputs.randn(*shape, leaf=True), inputs.randn(*shape, leaf=True)
    weight, grad, total_grad = inputs.randn(shape[-1], leaf=True), inputs.randn(*shape), inputs.randn(*shape)
    op = Op("residual", "x".join(map(str, shape)), 8 * x.nbytes, None)
    op.keep(x, add, grad, total_grad)
    module = LlamaRMSNorm(shape[-1], eps=1e-6).to(inputs.device)
    module.weight = torch.nn.Parameter(weight.detach())

    def stock() -> tuple[Tensor, Tensor]:
        total = x + add
        return total, module(total)

    _add(op, "eager", stock, [x, add, module.weight], [total_grad, grad])
    _add(op, "compile", torch.compile(stock, dynamic=False), [x, add, module.weight], [total_grad, grad])
    if inputs.liger:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Fused

        _add(
            op, "liger", lambda: Fused.apply(x, add, weight, 1e-6, 0.0, "llama", True)[::-1], [x, add, weight],
            [total_grad, grad],
        )  # fmt: skip
    ours = partial(add_rms_norm, x, add, weight, eps=1e-6, round_first=True, overwrite_grad=True)
    _add(op, "ours", ours, [x, add, weight], [total_grad, grad])
    return op


def rotary(inputs: Inputs) -> Op:
    config = inputs.config
    heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, q_grad, k_grad = (
        inputs.randn(inputs.batch, inputs.seq, n, size).transpose(1, 2) for n in (heads, kv, heads, kv)
    )
    q, k = q.requires_grad_(), k.requires_grad_()
    angle = inputs.randn(1, inputs.seq, size // 2).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    op = Op("rotary", f"{heads}+{kv} heads of {size}", 4 * (q.nbytes + k.nbytes), None)
    op.keep(q, k, q_grad, k_grad)
    stock = partial(apply_rotary_pos_emb, q, k, cos, sin)
    _add(op, "eager", stock, [q, k], [q_grad, k_grad])
    _add(op, "compile", partial(torch.compile(apply_rotary_pos_emb, dynamic=False), q, k, cos, sin), [q, k],
         [q_grad, k_grad])  # fmt: skip
    if inputs.liger:
        from liger_kernel.ops.rope import LigerRopeFunction

        _add(op, "liger", lambda: LigerRopeFunction.apply(q, k, cos, sin), [q, k], [q_grad, k_grad])
    _add(op, "ours", partial(rotary_, q, k, cos, sin, interleaved=False), [q, k], [q_grad, k_grad])
    return op


def swiglu(inputs: Inputs) -> Op:
    shape = (inputs.batch, inputs.seq, inputs.config.intermediate_size)
    gate, up, grad = inputs.randn(*shape, leaf=True), inputs.randn(*shape, leaf=True), inputs.randn(*shape)
    op = Op("glu", "x".join(map(str, shape)), 8 * gate.nbytes, None)
    op.keep(gate, up, grad)

    def stock(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    _add(op, "eager", partial(stock, gate, up), [gate, up], [grad])
    _add(op, "compile", partial(torch.compile(stock, dynamic=False), gate, up), [gate, up], [grad])
    if inputs.liger:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        _add(op, "liger", lambda: LigerSiLUMulFunction.apply(gate, up), [gate, up], [grad])
    _add(op, "ours", partial(glu, gate, up, activation="silu"), [gate, up], [grad])
    return op


def cross_entropy(inputs: Inputs, tokens: int) -> Op:
    """Output projection, loss and all gradients; the weight's in fp32, which Liger casts to bf16 at the end."""
    vocab, width = inputs.config.vocab_size, inputs.config.hidden_size
    hidden, weight = inputs.randn(tokens, width, leaf=True), inputs.randn(vocab, width, leaf=True)
    with torch.no_grad():
        weight *= 0.02
    labels = torch.randint(vocab, (tokens,), generator=inputs.generator, device=inputs.device)
    op = Op("linear_cross_entropy", f"{tokens} tokens, {vocab} x {width}", None, 6 * tokens * vocab * width)

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)

    one = [torch.ones((), device=inputs.device)]
    _add(op, "eager", partial(stock, hidden, weight), [hidden, weight], one)
    _add(op, "compile", partial(torch.compile(stock, dynamic=False), hidden, weight), [hidden, weight], one)
    if inputs.liger:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

        def liger() -> Tensor:
            more = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
            return Fused.apply(hidden, weight, labels, *more)[0]

        _add(op, "liger", liger, [hidden, weight], one)

    def ours() -> object:
        weight_sum = torch.empty(weight.shape, dtype=torch.float32, device=inputs.device)
        return loss_and_grads(
            hidden.detach(), weight.detach(), None, labels, Softmax(), denominator=float(tokens), weight_sum=weight_sum,
            bias_sum=None, overwrite=True,
        ), weight_sum  # fmt: skip

    def sliced() -> object:
        """Never more than an eighth of the projection or its gradient, if they were not here already."""
        loss, step = SlicedLoss(hidden.detach(), labels, Softmax(), denominator=float(tokens)), -(-vocab // 8)
        parts = [(a, weight.detach()[a : a + step]) for a in range(0, vocab, step)]
        weight_sum = torch.empty(step, width, dtype=torch.float32, device=inputs.device)
        for first, part in parts:
            loss.see(first, part, None)
        loss.loss()
        for first, part in parts:
            loss.grads(first, part, None, weight_sum=weight_sum[: len(part)], bias_sum=None, overwrite=True)
        return loss.hidden_grad()

    op.impls["ours"] = ours
    op.impls["ours sliced"] = sliced
    return op


def adamw(inputs: Inputs, numel: int) -> Op:
    """One step on the split planes with a bf16 gradient; torch's fused AdamW on fp32 moves 28 bytes, not 26."""
    master = inputs.randn(numel).float() * 0.02
    weight = torch.empty(numel, dtype=torch.bfloat16, device=inputs.device)
    residual = torch.empty(numel, dtype=torch.int16, device=inputs.device)
    split(master, weight, residual)
    grad, exp_avg = (master * 1e-2).bfloat16(), master * 1e-3
    exp_avg_sq = exp_avg**2
    op = Op("adamw", f"{numel} parameters", 26 * numel, None)
    state = (weight, residual, grad, exp_avg, exp_avg_sq)
    op.impls["eager"] = partial(reference_update, *state, HYPER)
    parameter = torch.nn.Parameter(master)
    parameter.grad = master * 1e-2
    if inputs.device.type == "cuda":
        optimizer = torch.optim.AdamW([parameter], lr=HYPER.lr, weight_decay=0.1, fused=True)
        op.impls["torch-fused-fp32"] = optimizer.step
    op.impls["ours"] = partial(update_, *state, HYPER)
    return op


def squared_norm(inputs: Inputs, numel: int) -> Op:
    grad = inputs.randn(numel).bfloat16()
    out = torch.empty((), device=inputs.device)
    op = Op("squared_norm", f"{numel} elements", grad.nbytes, None)
    op.impls["eager"] = partial(torch.linalg.vector_norm, grad, dtype=torch.float32, out=out)
    op.impls["ours"] = partial(squared_norm_, grad, out)
    return op


def block(inputs: Inputs) -> Op:
    """One decoder block as the engine runs it in backward: again from its input under grad, then its gradients.

    With each set of kernels, with each of ours left out, and as torch.compile makes it from the model's own code or
    around our kernels: one compiled function for all blocks, which takes their parameters, views into one flat tensor,
    as arguments.
    """
    config = inputs.config
    kinds: dict[str, dict[str, object]] = {"eager": {"kernels": "torch"}, "compile": {"kernels": "torch"}}
    if inputs.device.type == "cuda":
        kinds |= {"liger": {"kernels": "liger"}} if inputs.liger else {}
        kinds |= {"ours": {"kernels": "triton"}, "ours compiled": {"kernels": "triton"}}
        for left_out in ("rms_norm", "residual", "rotary", "glu"):
            kinds[f"ours without {left_out}"] = {"kernels": "triton", "without_kernels": (left_out,)}
    op = Op("block", f"{inputs.batch} x {inputs.seq} tokens", None, None, compared=True)
    hidden, grad = (inputs.randn(inputs.batch, inputs.seq, config.hidden_size) for _ in range(2))
    flat: Tensor | None = None
    family = import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    own = dict(vars(family))
    for name, more in kinds.items():
        decoder = Decoder(config, dtype=inputs.dtype, tile_numel=1 << 24, device=inputs.device, **more)
        unit = decoder.layout.blocks[0]
        if flat is None:
            flat = inputs.randn(decoder.layout.units[unit].numel) * 0.02
            products = decoder.layout.units[unit].decay_numel * inputs.batch * inputs.seq
            attention = inputs.batch * config.num_attention_heads * config.head_dim * inputs.seq**2
            op.flops = 6 * products + 6 * attention  # one forward and its backward; causal half
        op.impls[name] = _block_call(decoder, flat, hidden, grad, compiled="compile" in name)
        if name == "liger":  # which changes the family's function and classes for the whole process
            op.impls[name] = partial(_with_rotary, family, family.apply_rotary_pos_emb, op.impls[name])
            vars(family).update(own)
    return op


def _with_rotary(family: ModuleType, function: object, work: Callable[[], object]) -> object:
    own = family.apply_rotary_pos_emb
    family.apply_rotary_pos_emb = function
    try:
        return work()
    finally:
        family.apply_rotary_pos_emb = own


def packed(inputs: Inputs) -> Op:
    """`batch` samples of `seq` tokens in as many rows, all in one row, and as many tokens in one row of samples from
    short to long; a block with our kernels, run as in `block`."""
    config, batch, seq = inputs.config, inputs.batch, inputs.seq
    decoder = Decoder(config, dtype=inputs.dtype, tile_numel=1 << 24, device=inputs.device, kernels="auto")
    flat = inputs.randn(decoder.layout.units[decoder.layout.blocks[0]].numel) * 0.02
    hidden, grad = (inputs.randn(batch, seq, config.hidden_size) for _ in range(2))
    op = Op("packed", f"{batch} samples, {batch * seq} tokens", None, None)
    op.impls["rows"] = _block_call(decoder, flat, hidden, grad)
    one = [x.view(1, batch * seq, -1) for x in (hidden, grad)]
    uneven = [max(2 * seq * (i + 1) // (batch + 1), 1) for i in range(batch)]
    uneven[-1] += batch * seq - sum(uneven)
    for name, lengths in (("one row", [seq] * batch), ("one row, uneven", uneven)):
        positions = torch.cat([torch.arange(n) for n in lengths]).view(1, -1)
        op.impls[name] = _block_call(decoder, flat, *one, positions=positions)
    return op


def _block_call(
    decoder: Decoder,
    flat: Tensor,
    hidden: Tensor,
    grad: Tensor,
    *,
    compiled: bool = False,
    positions: Tensor | None = None,
) -> Callable[[], object]:
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    row = torch.zeros(1, decoder.hidden_size, dtype=hidden.dtype, device=hidden.device)
    packing = None if positions is None else packing_of(positions)
    positions = None if positions is None else positions.to(hidden.device)
    _, call = decoder.embed(row, {}, ids, padding_row=None, position_ids=positions, packing=packing)
    unit = decoder.layout.blocks[0]
    params = decoder.views(unit, flat, requires_grad=True)
    rerun = decoder.rerun
    if compiled:  # the last product is left out for good: a function that comes and goes would be compiled anew
        tail = decoder._tails[0]
        tail.forward = partial(_graph_only, tail)
        decoder._parts.block_forwards[0] = torch.compile(decoder._parts.block_forwards[0], dynamic=False)
        rerun = decoder.forward

    def run() -> object:
        x = hidden.detach().requires_grad_()
        out = rerun(unit, params, x, call)
        return torch.autograd.grad(out, [x, *params.values()], grad)

    return run


def ops(
    config: PretrainedConfig, *, batch: int, seq: int, tokens: int, device: torch.device
) -> Iterator[Callable[[], Op]]:
    """Each op, made only when it is called for. tokens: of the cross entropy."""
    inputs = Inputs(config, batch, seq, device)
    width, ffn = config.hidden_size, config.intermediate_size
    numel = 3 * width * ffn + 2 * width * width
    yield partial(norm, inputs)
    if config.model_type == "qwen3":
        yield partial(norm, inputs, heads=config.num_attention_heads)
    yield partial(residual, inputs)
    yield partial(rotary, inputs)
    yield partial(swiglu, inputs)
    yield partial(cross_entropy, inputs, tokens)
    yield partial(adamw, inputs, numel)
    yield partial(squared_norm, inputs, numel)
    yield partial(block, inputs)
    yield partial(packed, inputs)
