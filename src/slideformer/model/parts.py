"""Finds what is what in a Hugging Face decoder: table, glue, blocks, final norm, output projection.

Blocks are known by their list. What surrounds them is told apart by running the model's own forward once, on a few
zeros, with recorders in the place of the blocks: what ran before them is glue, what runs after them is the final norm.
The same run sees whether the hidden states go straight from one to the next, which is what the engine will do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from slideformer.model.build import ModelRefused, some
from slideformer.model.cache import PassCache


@dataclass(frozen=True, slots=True)
class Call:
    """What the model passes to each block besides the hidden states: positional and keyword arguments, per block.

    cache: in generation, where the blocks find their keys and values; it is among the arguments, too.
    """

    args: tuple[tuple[object, ...], ...]
    kwargs: tuple[dict[str, object], ...]
    cache: PassCache | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the tensors that are passed (masks, rotary tables, positions), each counted once."""
        passed = (t for args, kwargs in zip(self.args, self.kwargs, strict=True) for t in _tensors([args, kwargs]))
        stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in passed}
        return sum(stored.values())


class Binding:
    """Puts tensors in the place of a module's parameters for one call. Costs one dict write per parameter each way."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._places = []
        for name in names:
            owner, _, key = name.rpartition(".")
            params = model.get_submodule(owner)._parameters
            self._places.append((params, key, name, params[key]))

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        for params, key, name, _ in self._places:
            params[key] = tensors[name]

    def release(self) -> None:
        """Back to meta, so that no slot is kept alive from here."""
        for params, key, _, meta in self._places:
            params[key] = meta


class _Stop(Exception):
    """Raised where the rest of the model's forward is not wanted."""


class _ReturnsTuple(Exception):
    """The model indexes what a recorder returned: its blocks return tuples, not tensors."""


@dataclass
class Recorders:
    """Stand in for the blocks while the glue runs. The blocks stay in place, so attributes that the glue reads of them
    (attention_type, layer_type) are theirs; only their `forward` is shadowed on the instance.
    """

    model: PreTrainedModel
    blocks: list[nn.Module]
    returns_tuple: bool = False
    stop: bool = True
    hidden: torch.Tensor | None = None
    args: list[tuple[object, ...]] = field(default_factory=list)
    kwargs: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, block in enumerate(self.blocks):
            block.forward = self._recorder(index)

    @property
    def cache_name(self) -> str:
        """transformers renamed the argument in 5.24; the old name goes with 5.40."""
        known = inspect.signature(type(self.model).forward).parameters
        return "cache" if "cache" in known else "past_key_values"

    def _recorder(self, index: int) -> Callable[..., object]:
        def record(*args: object, **kwargs: object) -> object:
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            if len(self.args) != index:
                raise ModelRefused(
                    f"{self.model.config.model_type} does not run its blocks once each and in order (block {index} "
                    f"came at place {len(self.args)}); a unit runs once a pass: choose another model."
                )
            if index and not self.returns_tuple and hidden.shape == self.hidden.shape[1:]:
                raise _ReturnsTuple
            if index and hidden is not self.hidden:
                raise ModelRefused(
                    f"{self.model.config.model_type} changes the hidden states between block {index - 1} and block "
                    f"{index}, outside of both; blocks must feed each other directly: choose another model."
                )
            self.hidden = hidden
            self.args.append(args)
            self.kwargs.append(kwargs)
            if self.stop and index == len(self.blocks) - 1:
                raise _Stop
            return (hidden,) if self.returns_tuple else hidden

        return record

    def run(self, cache: PassCache | None = None, **inputs: torch.Tensor | None) -> tuple[torch.Tensor, Call]:
        """Hidden states before the first block, and what the blocks are called with."""
        self.hidden, self.args, self.kwargs = None, [], []
        cached = {} if cache is None else {self.cache_name: cache}
        try:
            self.model(**inputs, **cached, use_cache=cache is not None)
        except _Stop:
            pass
        if len(self.args) != len(self.blocks):
            raise ModelRefused(
                f"{self.model.config.model_type} ran {len(self.args)} of its {len(self.blocks)} blocks; every block "
                "must run: choose another model."
            )
        hidden, call = self.hidden, Call(tuple(self.args), tuple(self.kwargs), cache)
        self.hidden, self.args, self.kwargs = None, [], []
        return hidden, call


@dataclass(frozen=True)
class Parts:
    """Modules of a model by role, and the parameter names that belong to each. Names are state-dict names."""

    table: nn.Embedding
    table_name: str
    padding_idx: int | None
    block_names: list[list[str]]
    block_forwards: list[Callable[..., object]]
    glue_names: list[str]
    final: nn.Module | None
    final_names: list[str]
    output_name: str | None  # None: tied to the table
    bias_name: str | None
    recorders: Recorders


def find_parts(model: PreTrainedModel, device: torch.device) -> Parts:
    """Cut `model` (from `build`) into parts, and put recorders in the place of its blocks.

    Raises ModelRefused if a parameter has no role or several, or the hidden states take another way than straight
    from glue through the blocks and the final norm to the output projection.
    """
    names = {id(p): n for n, p in model.named_parameters()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelRefused(
            f"{model.config.model_type} has {type(table).__name__} as input embedding and {type(head).__name__} as "
            "output projection; an Embedding and a Linear are needed: choose another model."
        )
    blocks = _find_blocks(model)
    block_names = [[n for n in (names[id(p)] for p in block.parameters())] for block in blocks]
    _refuse_shared(model, blocks, block_names)
    table_name, head_name = names[id(table.weight)], names[id(head.weight)]
    bias_name = None if head.bias is None else names[id(head.bias)]
    covered = {table_name, head_name, bias_name}.union(*block_names)
    rest = [n for n in names.values() if n not in covered]

    forwards = [block.forward for block in blocks]
    recorders = Recorders(model, blocks)
    # An id of the whole table: on a few gathered rows it is another row or none, so each call says its own.
    padding_idx, table.padding_idx = table.padding_idx, None
    before, final = _Probe(model, recorders, table, table_name, head, rest, device).run()
    final_names = [] if final is None else [names[id(p)] for p in final.parameters()]
    glue_names = [n for n in rest if n in before and n not in final_names]
    uncovered = set(rest) - set(glue_names) - set(final_names)
    if uncovered:
        raise ModelRefused(
            f"{model.config.model_type} has parameters that are neither in the embedding, nor before the blocks, in "
            f"them, in the final norm or in the output projection ({some(uncovered)}); they would not be trained: "
            "choose another model."
        )
    return Parts(
        table=table,
        table_name=table_name,
        padding_idx=padding_idx,
        block_names=block_names,
        block_forwards=forwards,
        glue_names=glue_names,
        final=final,
        final_names=final_names,
        output_name=None if head_name == table_name else head_name,
        bias_name=bias_name,
        recorders=recorders,
    )


def _find_blocks(model: PreTrainedModel) -> list[nn.Module]:
    count = getattr(model.config, "num_hidden_layers", None)
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and not inside
            and any(True for _ in module.parameters())
        ):
            found[name] = module
    if len(found) != 1:
        raise ModelRefused(
            f"{model.config.model_type} has {len(found) or 'no'} lists of {count} blocks (num_hidden_layers)"
            f"{': ' + some(set(found)) if found else ''}; exactly one is needed, with every block in it once: choose "
            "another model."
        )
    return list(next(iter(found.values())))


def _refuse_shared(model: PreTrainedModel, blocks: list[nn.Module], block_names: list[list[str]]) -> None:
    """Any parameter under two names must be the tied table: an engine that updates unit by unit cannot share more."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    seen: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in seen and param is not table and param is not head:
            raise ModelRefused(
                f"{model.config.model_type} shares a parameter between {seen[id(param)]} and {name}; only the output "
                "projection may share one, with the input embedding: choose another model."
            )
        seen[id(param)] = name
    if any(not names for names in block_names):
        raise ModelRefused(f"{model.config.model_type} has blocks without parameters: choose another model.")


class _Probe:
    """One run of the model's own forward on zeros, with recorders for blocks, up to the output projection."""

    def __init__(
        self,
        model: PreTrainedModel,
        recorders: Recorders,
        table: nn.Embedding,
        table_name: str,
        head: nn.Linear,
        rest: list[str],
        device: torch.device,
    ) -> None:
        self.model, self.recorders, self.head, self.device = model, recorders, head, device
        params = dict(model.named_parameters())
        self.values = {n: torch.zeros(params[n].shape, dtype=params[n].dtype, device=device) for n in rest}
        self.values[table_name] = torch.zeros(2, table.embedding_dim, dtype=table.weight.dtype, device=device)
        for value in self.values.values():
            value.requires_grad_()
        self.binding = Binding(model, self.values)
        inside = {id(m) for block in recorders.blocks for m in block.modules()}
        self.outside = {n: m for n, m in model.named_modules() if n and id(m) not in inside}

    def run(self) -> tuple[set[str], nn.Module | None]:
        """Names of the parameters whose modules ran before the blocks, and the module that ran after them, if any."""
        self.binding.bind(self.values)
        try:
            try:
                return self._run()
            except _ReturnsTuple:
                self.recorders.returns_tuple = True
                return self._run()
        finally:
            self.binding.release()

    def _run(self) -> tuple[set[str], nn.Module | None]:
        before: list[str] = []
        after: dict[str, list[object]] = {}  # module -> its input, its output
        last = len(self.recorders.blocks)

        def started(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
            def hook(module: nn.Module, args: tuple[object, ...]) -> None:
                if len(self.recorders.args) < last:
                    before.append(name)
                else:
                    after[name] = [args[0] if args else None]
                    if module is self.head:
                        raise _Stop

            return hook

        def ended(name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
            def hook(_module: nn.Module, _args: tuple[object, ...], output: object) -> None:
                if name in after:
                    after[name].append(output)

            return hook

        hooks = [m.register_forward_pre_hook(started(n)) for n, m in self.outside.items()]
        hooks += [m.register_forward_hook(ended(n)) for n, m in self.outside.items()]
        ids = torch.tensor([[0, 1, 1], [1, 0, 1]], device=self.device)
        self.recorders.stop = False
        try:
            hidden, call = self.recorders.run(input_ids=ids)
        finally:
            self.recorders.stop = True
            for handle in hooks:
                handle.remove()
        self._refuse_trained_call(call)
        owners = {n: n.rpartition(".")[0] for n in self.values}
        return {n for n, owner in owners.items() if owner in before}, self._find_final(hidden, after)

    def _refuse_trained_call(self, call: Call) -> None:
        for args, kwargs in zip(call.args, call.kwargs, strict=True):
            tensors = [t for t in _tensors([*args, *kwargs.values()]) if t.requires_grad]
            if tensors:
                raise ModelRefused(
                    f"{self.model.config.model_type} passes something trained to its blocks besides the hidden states "
                    f"(a tensor of shape {tuple(tensors[0].shape)}); its gradient would be lost: choose another model."
                )

    def _find_final(self, hidden: torch.Tensor, after: dict[str, list[object]]) -> nn.Module | None:
        """The one module between the last block and the output projection; the hidden states go straight through."""
        head_name = next(n for n, m in self.outside.items() if m is self.head)
        kind = self.model.config.model_type
        if head_name not in after:
            raise ModelRefused(f"{kind} does not end in its output projection {head_name}: choose another model.")
        tops = [n for n in after if n != head_name and not any(n.startswith(f"{o}.") for o in after)]
        tops = [n for n in tops if not isinstance(self.outside[n], (nn.Dropout, nn.Identity))]
        if len(tops) > 1:
            raise ModelRefused(
                f"{kind} runs {some(set(tops))} between its last block and {head_name}; only one final norm is run "
                "there: choose another model."
            )
        if _same(hidden[0], after[tops[0] if tops else head_name][0]) and not self.recorders.returns_tuple:
            raise _ReturnsTuple
        flow = [hidden, *(after[tops[0]] if tops else [hidden]), after[head_name][0]]
        if not (_same(flow[0], flow[1]) and _same(flow[-2], flow[-1])):
            raise ModelRefused(
                f"{kind} changes the hidden states between its last block and {head_name} other than by a final norm; "
                "that would be left out: choose another model."
            )
        return self.outside[tops[0]] if tops else None


def _same(a: object, b: object) -> bool:
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return tensors and a.shape == b.shape and a.data_ptr() == b.data_ptr()


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found
