"""The decoder's own promises: layout, views, buffers, binding, frozen parameters, the glue's arguments."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, masking_utils

from families import FAMILIES, PAD, random_model
from model.test_against_hf import DTYPE, FAMILY, batch
from model.unit_by_unit import flats_of, gather, run_units, run_whole
from slideformer.layout import UnitKind
from slideformer.model.build import choose_attention
from slideformer.model.decoder import Decoder
from slideformer.model.packed_attention import packing_of
from slideformer.model.packing import packing_known
from slideformer.model.projection import Projection


def build(family: str, *, tied: bool = True, **more: object) -> Decoder:
    return Decoder(FAMILIES[family](tied), dtype=torch.float32, tile_numel=1000, **more)


@FAMILY
@DTYPE
def test_buffers_have_the_values_of_a_normally_built_and_of_a_loaded_model(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    config = FAMILIES[family](True)
    decoder = Decoder(config, dtype=dtype, tile_numel=1000)
    own = dict(decoder._model.named_buffers())
    built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    built.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for model in (built, loaded):
        expected = dict(model.named_buffers())
        assert set(own) == set(expected)
        for name, buffer in expected.items():
            assert own[name].dtype == buffer.dtype and torch.equal(own[name], buffer), name


@FAMILY
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_layout_covers_the_state_dict_and_matrices_decay(family: str, tied: bool) -> None:
    decoder = build(family, tied=tied)
    model = random_model(decoder.config)
    params = {p.name: p for u in decoder.layout.units for p in u.params}
    assert {n: p.shape for n, p in params.items()} == {n: tuple(t.shape) for n, t in model.named_parameters()}
    assert set(params) <= set(model.state_dict())
    assert all(p.decay == (len(p.shape) >= 2) and p.trainable for p in params.values())
    assert decoder.layout.tied == tied
    assert [u.name for u in decoder.layout.units if u.kind is UnitKind.BLOCK] == [f"block.{i}" for i in range(4)]
    assert (decoder.vocab_size, decoder.hidden_size) == tuple(model.get_input_embeddings().weight.shape)
    assert decoder.layout.units[decoder.layout.output].params[0].shape == (decoder.vocab_size, decoder.hidden_size)


def test_what_stands_around_the_blocks_is_found_where_it_runs() -> None:
    def names(family: str, kind: UnitKind) -> list[str]:
        layout = build(family, tied=False).layout
        found = layout.find(kind)
        return [] if found is None else [p.name for p in layout.units[found].params]

    assert names("gpt2", UnitKind.GLUE) == ["transformer.wpe.weight"]
    assert names("gpt2", UnitKind.FINAL) == ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert names("phi", UnitKind.FINAL)[-1] == "lm_head.bias"
    assert names("olmo", UnitKind.FINAL) == []  # its final norm has no parameters, and still runs
    assert names("llama", UnitKind.GLUE) == []
    assert names("llama", UnitKind.OUTPUT) == ["lm_head.weight"]


def test_projections_carry_each_familys_scale_cap_and_bias() -> None:
    plain = Projection(bias=None, softcap=None, scale=1.0)
    expected = {name: plain for name in FAMILIES}
    expected["gemma2"] = Projection(bias=None, softcap=3.0, scale=1.0)
    expected["granite"] = Projection(bias=None, softcap=None, scale=1 / 8)
    expected["cohere"] = Projection(bias=None, softcap=None, scale=0.25)
    expected["phi"] = Projection(bias="lm_head.bias", softcap=None, scale=1.0)
    assert {name: build(name).projection for name in FAMILIES} == expected


def test_soft_capped_attention_is_eager_and_everything_else_sdpa() -> None:
    chosen = {name: build(name).attn_implementation for name in FAMILIES}
    assert chosen == {name: "eager" if name == "gemma2" else "sdpa" for name in FAMILIES}
    assert build("llama", attn_implementation="eager").attn_implementation == "eager"
    capped = FAMILIES["llama"](True)
    capped.attn_logit_softcapping = 30.0  # a class that says it has sdpa, and would leave the cap out
    assert choose_attention(capped) == "eager"


def test_views_share_memory_with_a_flat_vector_that_may_be_longer() -> None:
    decoder = build("qwen2", frozen=(r"\.bias$",))
    unit = decoder.layout.blocks[1]
    flat = torch.zeros(decoder.layout.units[unit].numel + 17)
    views = decoder.views(unit, flat, requires_grad=True)
    assert list(views) == [p.name for p in decoder.layout.units[unit].params]
    for param in decoder.layout.units[unit].params:
        view = views[param.name]
        assert view.is_leaf and view.requires_grad == param.trainable and view.shape == param.shape
        assert view.data_ptr() == flat[decoder.layout.units[unit].offsets[param.name] :].data_ptr()
    assert not any(v.requires_grad for v in decoder.views(unit, flat).values())
    assert not flat.requires_grad


def test_nothing_stays_bound_after_a_call_or_a_failure() -> None:
    decoder = build("gpt2")
    flats = flats_of(decoder, random_model(decoder.config).state_dict())
    ids, labels = batch()
    run_units(decoder, flats, ids, labels)
    with pytest.raises(RuntimeError):
        decoder.forward(3, decoder.views(3, flats[3]), torch.zeros(1, 4, 63), _call(decoder, flats, ids))
    assert all(p.is_meta for p in decoder._model.parameters())


def _call(decoder: Decoder, flats: list[torch.Tensor], ids: torch.Tensor, **more: torch.Tensor):
    table = flats[0].view(decoder.vocab_size, decoder.hidden_size)
    _, rows, remapped, row = gather(table, ids, decoder.padding_idx)
    glue = decoder.layout.find(UnitKind.GLUE)
    params = {} if glue is None else decoder.views(glue, flats[glue])
    return decoder.embed(rows, params, remapped, padding_row=row, **more)[1]


class DeviceQuestions(TorchDispatchMode):
    """Operations whose result the host must wait for: on a GPU, each would drain the queue."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "aten::nonzero", "aten::equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in func.name() for name in self.NAMES):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@FAMILY
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_neither_glue_nor_blocks_wait_for_the_device(family: str, packed: bool) -> None:
    decoder = build(family)
    flats = flats_of(decoder, random_model(decoder.config).state_dict())
    ids = batch()[0]
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(3, 16) if packed else None
    packing = None if positions is None else packing_of(positions)
    table = flats[0].view(decoder.vocab_size, decoder.hidden_size)
    _, rows, remapped, row = gather(table, ids, decoder.padding_idx)
    glue = decoder.layout.find(UnitKind.GLUE)
    params = {} if glue is None else decoder.views(glue, flats[glue])
    views = [decoder.views(unit, flats[unit]) for unit in decoder.layout.blocks]
    with DeviceQuestions() as asked:
        hidden, call = decoder.embed(rows, params, remapped, padding_row=row, position_ids=positions, packing=packing)
        for unit, view in zip(decoder.layout.blocks, views, strict=True):
            hidden = decoder.forward(unit, view, hidden, call)
    assert asked.found == []


def test_what_is_known_of_packing_is_known_in_one_thread_only() -> None:
    positions = torch.tensor([[0, 1, 0, 1]])
    found = []
    with packing_known(False):
        assert masking_utils.find_packed_sequence_indices(positions) is None
        thread = Thread(target=lambda: found.append(masking_utils.find_packed_sequence_indices(positions)))
        thread.start()
        thread.join()
    with packing_known(True):
        mine = masking_utils.find_packed_sequence_indices(positions)
    assert found[0].tolist() == mine.tolist() == [[0, 0, 1, 1]]


def test_masks_made_elsewhere_still_look_for_packed_samples() -> None:
    decoder = build("llama")
    run_units(decoder, flats_of(decoder, random_model(decoder.config).state_dict()), *batch())
    with DeviceQuestions() as asked:
        random_model(decoder.config)(batch()[0], use_cache=False)
    assert asked.found != []  # and the counting above counts


def test_two_decoders_do_not_see_each_other() -> None:
    first, second = build("gemma3"), build("gemma3", tied=False)
    model = random_model(first.config)
    flats, ids = flats_of(first, model.state_dict()), batch()[0]
    before = run_units(first, flats, *batch()).loss
    other = random_model(second.config, seed=1)
    assert run_units(second, flats_of(second, other.state_dict()), *batch()).loss != before
    assert run_units(first, flats, *batch()).loss == before
    assert ids.equal(batch()[0])


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3"])
def test_toy_sequences_are_longer_than_the_sliding_window(family: str) -> None:
    config = FAMILIES[family](True)
    narrow = Decoder(config, dtype=torch.float32, tile_numel=1000)
    config.sliding_window = 64
    wide = Decoder(config, dtype=torch.float32, tile_numel=1000)
    weights = random_model(config).state_dict()
    results = [run_units(d, flats_of(d, weights), *batch()).logits for d in (narrow, wide)]
    window = 5
    assert torch.allclose(results[0][:, :window], results[1][:, :window], atol=1e-5)
    assert not torch.allclose(results[0][:, window:], results[1][:, window:], atol=1e-2)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_padding_row_gets_no_gradient_from_the_input_side(tied: bool) -> None:
    decoder = build("llama", tied=tied)
    model = random_model(decoder.config, attn_implementation="sdpa")
    ids, labels = batch()
    ids[:, 0] = PAD  # at the left, without a mask: what follows attends to it
    whole = run_whole(model, ids, labels)
    name = decoder.layout.units[0].params[0].name
    units = run_units(decoder, flats_of(decoder, model.state_dict()), ids, labels)
    assert torch.equal(units.grads[name], whole.grads[name])
    assert bool(units.grads[name][PAD].any()) == tied  # the output side of a tied table still reaches it


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("llama", (r"embed_tokens",)),
        ("llama", (r"layers\.[01]\.", r"norm")),
        ("gpt2", (r"wpe|wte", r"bias$")),
        ("phi", (r"lm_head\.bias",)),
    ],
)
def test_frozen_parameters_get_no_gradient_and_others_the_same_one(family: str, frozen: tuple, tied: bool) -> None:
    import re

    decoder = build(family, tied=tied, frozen=frozen)
    model = random_model(decoder.config, attn_implementation="sdpa")
    hit = {n for n, _ in model.named_parameters() if any(re.search(p, n) for p in frozen)}
    for name, param in model.named_parameters():
        param.requires_grad_(name not in hit)
    trainable = {p.name for u in decoder.layout.units for p in u.params if p.trainable}
    assert hit and trainable == {n for n, _ in model.named_parameters()} - hit
    ids, labels = batch()
    whole = run_whole(model, ids, labels)
    units = run_units(decoder, flats_of(decoder, model.state_dict()), ids, labels)
    assert set(units.grads) == set(whole.grads) == trainable
    for name, grad in whole.grads.items():
        assert torch.equal(units.grads[name], grad), name


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_a_large_model_is_cut_without_allocating_it(size: str) -> None:
    shape = {"8b": (4096, 14336, 32, 32), "70b": (8192, 28672, 80, 64)}[size]
    hidden, mlp, layers, heads = shape
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
    )
    random_state = torch.get_rng_state()
    decoder = Decoder(config, dtype=torch.bfloat16, tile_numel=1 << 24)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert round(decoder.layout.numel / 1e9, 2) == {"8b": 8.03, "70b": 70.55}[size]
    assert all(p.is_meta for p in decoder._model.parameters())
    assert sum(b.nbytes for b in decoder._model.buffers()) < 4096
