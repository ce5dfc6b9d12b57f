"""Streaming load and save of safetensors: every element once, pieces of a tile, and a sentence for every bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from families import FAMILIES, random_model
from slideformer.errors import BadInput
from slideformer.model import files, weights
from slideformer.model.decoder import Decoder
from slideformer.model.folder import read_config, read_generation_config, save_model

TILE = 1000  # smaller than every matrix, no divisor of any


def decoder_for(family: str, *, tied: bool, tile: int = TILE) -> Decoder:
    return Decoder(FAMILIES[family](tied), dtype=torch.float32, tile_numel=tile)


class Flats:
    """Stores as plain vectors that count how often each element was written."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.values = [torch.full((u.numel,), float("nan")) for u in decoder.layout.units]
        self.writes = [torch.zeros(u.numel, dtype=torch.int32) for u in decoder.layout.units]
        self.longest = 0

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        assert values.dim() == 1 and values.device.type == "cpu"
        self.longest = max(self.longest, len(values))
        self.values[unit][offset : offset + len(values)] = values
        self.writes[unit][offset : offset + len(values)] += 1

    def read(self, unit: int, start: int, stop: int) -> torch.Tensor:
        assert stop - start <= self.decoder.layout.tile_numel
        return self.values[unit][start:stop]

    def load(self, folder: Path) -> Flats:
        weights.load(folder, self.decoder.layout, self.write, names=self.decoder.names)
        return self

    def named(self) -> dict[str, torch.Tensor]:
        found = {}
        for unit, values in enumerate(self.values):
            found |= self.decoder.views(unit, values)
        return found


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().float() for n, p in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", ["1MB", "200KB"], ids=["single", "sharded"])
def test_loads_what_transformers_saved_each_element_once(tmp_path: Path, family: str, tied: bool, shard: str) -> None:
    decoder = decoder_for(family, tied=tied)
    model = random_model(decoder.config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / weights.INDEX).exists() == (shard == "200KB")
    flats = Flats(decoder).load(tmp_path)
    assert all((count == 1).all() for count in flats.writes)
    assert flats.longest == TILE
    assert_equal(flats.named(), state(model))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transformers_loads_what_was_saved(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    decoder = decoder_for(family, tied=tied)
    model = random_model(decoder.config)
    flats = Flats(decoder)
    for name, view in flats.named().items():
        view.copy_(state(model)[name])
    written = save_model(tmp_path, decoder, flats.read, dtype=dtype, max_shard_nbytes=150_000)
    assert sorted(written) == sorted(p.name for p in tmp_path.iterdir())
    assert len([n for n in written if n.endswith(".safetensors")]) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (
        type(loaded) is type(model) and loaded.dtype == dtype and loaded.config.architectures == [type(model).__name__]
    )
    assert_equal(state(loaded), {n: t.to(dtype).float() for n, t in state(model).items()})
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    ids = torch.arange(6, 26).view(2, 10)
    with torch.no_grad():
        reference = random_model(decoder.config, dtype=dtype)
        reference.load_state_dict(model.state_dict())
        loaded.set_attn_implementation("eager")
        assert torch.equal(loaded.eval()(ids).logits, reference(ids).logits)


def test_a_saved_file_holds_the_same_bytes_as_the_library_would_read_and_is_aligned(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=False)
    flats = Flats(decoder)
    for name, view in flats.named().items():
        view.copy_(state(random_model(decoder.config))[name])
    written = weights.save(tmp_path, decoder.layout, flats.read, dtype=torch.float32, names=decoder.names)
    assert written == {weights.SINGLE: files.sum_of(tmp_path / weights.SINGLE)}
    assert_equal(load_file(tmp_path / weights.SINGLE), flats.named())
    header = int.from_bytes((tmp_path / weights.SINGLE).read_bytes()[:8], "little")
    assert header % 8 == 0


@pytest.mark.parametrize(("first", "second"), [(100_000, 10**9), (10**9, 100_000), (100_000, 200_000)])
def test_a_second_save_leaves_only_current_files_and_files_of_others(tmp_path: Path, first: int, second: int) -> None:
    decoder = decoder_for("llama", tied=True)
    flats = Flats(decoder)
    for values in flats.values:
        values.normal_()
    save_model(tmp_path, decoder, flats.read, dtype=torch.float32, max_shard_nbytes=first)
    foreign = ["tokenizer.json", "adapter.safetensors", "model-00001-of-00099.safetensors"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    for values in flats.values:
        values.normal_()
    written = save_model(tmp_path, decoder, flats.read, dtype=torch.float32, max_shard_nbytes=second)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*written, *foreign])
    assert_equal(Flats(decoder).load(tmp_path).named(), flats.named())


def test_an_old_index_cannot_make_a_save_remove_a_path_elsewhere(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    flats = Flats(decoder)
    for values in flats.values:
        values.zero_()
    target = tmp_path / "model"
    target.mkdir()
    names = ["../mine.safetensors", "notes.txt", "model-00001-of-00002.safetensors"]
    for name in names:
        (target / name).write_text("x")
    (target / weights.INDEX).write_text(json.dumps({"weight_map": {str(i): n for i, n in enumerate(names)}}))
    save_model(target, decoder, flats.read, dtype=torch.float32)
    assert [(target / name).exists() for name in names] == [True, True, False]


def test_a_config_that_names_code_is_saved_without_it(tmp_path: Path) -> None:
    config = FAMILIES["phi3"](True)
    config.auto_map = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    decoder = Decoder(config, dtype=torch.float32, tile_numel=TILE)
    flats = Flats(decoder)
    for values in flats.values:
        values.zero_()
    save_model(tmp_path, decoder, flats.read, dtype=torch.bfloat16)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in saved and saved["architectures"] == ["Phi3ForCausalLM"] and saved["dtype"] == "bfloat16"
    assert decoder.config.auto_map and config.auto_map


def test_a_save_that_fails_leaves_the_earlier_one_as_it_was(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    flats = Flats(decoder)
    for values in flats.values:
        values.normal_()
    save_model(tmp_path, decoder, flats.read, dtype=torch.float32)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(unit: int, start: int, stop: int) -> torch.Tensor:
        if unit == 3:
            raise OSError("No space left on device")
        return flats.read(unit, start, stop) + 1

    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path, decoder, fail, dtype=torch.float32, max_shard_nbytes=100_000)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    written = save_model(tmp_path, decoder, flats.read, dtype=torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(written)


def test_generation_settings_are_carried_over(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    flats = Flats(decoder)
    for values in flats.values:
        values.zero_()
    source = GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=[2, 9])
    save_model(tmp_path, decoder, flats.read, dtype=torch.float32, generation_config=source)
    found = read_generation_config(tmp_path)
    assert found is not None and (found.temperature, found.eos_token_id) == (0.7, [2, 9])
    assert read_generation_config(tmp_path / "..") is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_float_type_arrives_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = decoder_for("llama", tied=True)
    stored = {n: t.to(dtype) for n, t in state(random_model(decoder.config)).items()}
    save_file(stored, tmp_path / weights.SINGLE)
    flats = Flats(decoder).load(tmp_path)
    assert_equal(flats.named(), {n: t.float() for n, t in stored.items()})


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_checkpoint_of_the_base_model_loads_without_its_prefix(tmp_path: Path, family: str) -> None:
    decoder = decoder_for(family, tied=True)
    model = random_model(decoder.config)
    model.base_model.save_pretrained(tmp_path)
    assert not any(n.startswith(decoder.names.base_prefix) for n in load_file(tmp_path / weights.SINGLE))
    assert_equal(Flats(decoder).load(tmp_path).named(), state(model))


def test_a_module_that_was_renamed_is_stored_under_its_old_name(tmp_path: Path) -> None:
    decoder = decoder_for("gpt_neox", tied=False)
    model = random_model(decoder.config)
    assert decoder.names.stored == {"lm_head.weight": "embed_out.weight"}
    model.save_pretrained(tmp_path / "theirs")
    flats = Flats(decoder).load(tmp_path / "theirs")
    save_model(tmp_path / "ours", decoder, flats.read, dtype=torch.float32)
    theirs, ours = (load_file(tmp_path / who / weights.SINGLE) for who in ("theirs", "ours"))
    assert "embed_out.weight" in theirs
    assert_equal(ours, theirs)
    save_file(state(model), tmp_path / weights.SINGLE)  # under the new name
    assert_equal(Flats(decoder).load(tmp_path).named(), state(model))


def _stored(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in state(random_model(decoder.config)).items()}


def test_buffers_of_older_checkpoints_and_an_equal_copy_of_the_table_are_ignored(tmp_path: Path) -> None:
    decoder = decoder_for("gpt2", tied=True)
    stored = _stored(decoder)
    extra = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    extra["lm_head.weight"] = stored["transformer.wte.weight"].clone()
    save_file(stored | extra, tmp_path / weights.SINGLE)
    assert_equal(Flats(decoder).load(tmp_path).named(), stored)
    decoder = decoder_for("llama", tied=True)
    stored = _stored(decoder)
    save_file(stored | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, tmp_path / weights.SINGLE)
    assert_equal(Flats(decoder).load(tmp_path).named(), stored)


def test_a_tied_table_may_be_stored_under_the_projections_name_only(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    stored = _stored(decoder)
    renamed = dict(stored)
    renamed["lm_head.weight"] = renamed.pop("model.embed_tokens.weight")
    save_file(renamed, tmp_path / weights.SINGLE)
    assert_equal(Flats(decoder).load(tmp_path).named(), stored)


def refusal(decoder: Decoder, folder: Path) -> str:
    """The sentence of the refusal; nothing may have been handed on before it."""
    flats = Flats(decoder)
    with pytest.raises(BadInput) as checked:
        weights.check(folder, decoder.layout, names=decoder.names)
    with pytest.raises(BadInput) as loaded:
        flats.load(folder)
    assert not any(count.any() for count in flats.writes)
    assert str(checked.value) == str(loaded.value)
    return str(loaded.value)


def test_tied_by_config_but_two_tensors_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    stored = _stored(decoder)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["lm_head.weight"][-1, -1] += 0.5  # the very last element, in the last piece
    save_file(stored, tmp_path / weights.SINGLE)
    flats = Flats(decoder)
    with pytest.raises(BadInput) as error:
        flats.load(tmp_path)
    assert not any(count.any() for count in flats.writes)
    path = tmp_path / weights.SINGLE
    assert str(error.value) == (
        f"{path}: lm_head.weight differs from model.embed_tokens.weight, but config.json ties them "
        "(tie_word_embeddings is true), so one of the two would be lost: set tie_word_embeddings to false in "
        "config.json, or remove lm_head.weight from the checkpoint."
    )


def test_missing_unexpected_and_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=False)
    stored = _stored(decoder)
    path = tmp_path / weights.SINGLE
    name = "model.layers.2.mlp.up_proj.weight"

    save_file({n: t for n, t in stored.items() if n != name}, path)
    assert refusal(decoder, tmp_path) == (
        f"{tmp_path} does not hold {name}; every parameter of the model must be there: check that config.json belongs "
        "to this checkpoint."
    )
    save_file({n: t for n, t in stored.items() if n != "lm_head.weight"}, path)
    assert refusal(decoder, tmp_path).endswith(
        "does not hold lm_head.weight; every parameter of the model must be there: check that config.json belongs to "
        "this checkpoint, or set tie_word_embeddings to true in it if the output projection is the embedding."
    )
    save_file(stored | {"model.layers.4.mlp.up_proj.weight": torch.zeros(2), "x": torch.zeros(2)}, path)
    assert refusal(decoder, tmp_path) == (
        f"{path} holds model.layers.4.mlp.up_proj.weight, x, which the model does not have; only its own parameters "
        "are allowed: check that config.json belongs to this checkpoint."
    )
    save_file(stored | {name: stored[name].T.contiguous()}, path)
    assert refusal(decoder, tmp_path) == (
        f"{path}: {name} has shape [64, 96], the model's config asks for [96, 64]: check that config.json belongs to "
        "this checkpoint."
    )
    save_file(stored | {name: stored[name].to(torch.int8)}, path)
    assert refusal(decoder, tmp_path) == (
        f"{path}: {name} is stored as I8; weights must be stored as one of F64, F32, F16, BF16: use a checkpoint that "
        "is not quantised."
    )


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=False)
    stored = _stored(decoder)
    stored["model.norm.weight"][7] = float("nan")
    save_file(stored, tmp_path / weights.SINGLE)
    with pytest.raises(BadInput, match=r"model\.safetensors: model\.norm\.weight holds values that are not finite"):
        Flats(decoder).load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    decoder = decoder_for("llama", tied=True)
    save_file(_stored(decoder), tmp_path / weights.SINGLE)
    path = tmp_path / weights.SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    text = refusal(decoder, tmp_path)
    assert text.startswith(f"{path} is not a complete safetensors file (") and text.endswith("bytes): copy it again.")


def test_folders_without_usable_weights_are_refused(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    missing = tmp_path / "nowhere"
    assert refusal(decoder, missing) == f"{missing} is not a folder; give the folder of a Hugging Face checkpoint."
    assert refusal(decoder, tmp_path) == (
        f"{tmp_path} holds neither model.safetensors nor model.safetensors.index.json: give the folder of a complete "
        "checkpoint."
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert refusal(decoder, tmp_path) == (
        f"{tmp_path} holds pytorch_model.bin but no safetensors; pickled weights can run code and are not read: "
        "convert once with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder), or set "
        "allow_pickle: true, which reads tensors and runs nothing."
    )


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    decoder = decoder_for("llama", tied=True)
    model = random_model(decoder.config)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    path = tmp_path / weights.INDEX
    index = json.loads(path.read_text())
    good = index["weight_map"]
    shards = sorted(set(good.values()))
    name = next(n for n, f in good.items() if f == shards[0])

    path.write_text(json.dumps({"weight_map": good | {name: shards[1]}}))
    assert refusal(decoder, tmp_path) == f"{path} says that {shards[1]} holds {name}, but it does not."
    path.write_text(json.dumps({"weight_map": good | {name: "../outside.safetensors"}}))
    assert "must map tensor names to names of files in the same folder" in refusal(decoder, tmp_path)
    path.write_text("{")
    assert refusal(decoder, tmp_path).startswith(f"{path} is not the index of a sharded checkpoint (")
    path.write_text(json.dumps({"weight_map": good}))
    twice = load_file(tmp_path / shards[1]) | {name: load_file(tmp_path / shards[0])[name]}
    save_file(twice, tmp_path / shards[1])
    assert refusal(decoder, tmp_path) == (
        f"{tmp_path / shards[1]} holds {name}, and so does {shards[0]}; each tensor must be stored once: save the "
        "checkpoint again."
    )
    (tmp_path / shards[0]).unlink()
    assert refusal(decoder, tmp_path) == (f"{path} names {shards[0]}, which is not there: download or copy it again.")


def test_configs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    def text() -> str:
        with pytest.raises(BadInput) as error:
            read_config(tmp_path / "model")
        return str(error.value)

    folder, path = tmp_path / "model", tmp_path / "model" / "config.json"
    assert text() == (
        f"{folder} is not a folder; give the folder of a Hugging Face checkpoint on this machine (a model of the "
        "hub is downloaded first: hf download NAME --local-dir FOLDER)."
    )
    folder.mkdir()
    assert text() == (
        f"{folder} has no config.json; give the folder of a Hugging Face checkpoint, which slideformer export makes of "
        "a run's."
    )
    for bad in ("{", "[]", "{}", '{"model_type": "no-such-model"}'):
        path.write_text(bad)
        assert text().startswith(f"{path} is not a model config that transformers knows (")
    decoder = decoder_for("gemma3", tied=True)
    decoder.config.save_pretrained(folder)
    assert read_config(folder).layer_types == decoder.config.layer_types


# pickles


def pickled_model(folder: Path, *, shards: bool = False) -> tuple[Decoder, torch.nn.Module]:
    decoder = decoder_for("llama", tied=True)
    model = random_model(decoder.config, dtype=torch.bfloat16)
    tensors = dict(model.state_dict())  # with lm_head.weight, the same memory as the table
    if not shards:
        torch.save(tensors, folder / "pytorch_model.bin")
        return decoder, model
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    weight_map = {}
    for i, half in enumerate(halves):
        torch.save(half, folder / f"pytorch_model-{i}.bin")
        weight_map |= dict.fromkeys(half, f"pytorch_model-{i}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return decoder, model


@pytest.mark.parametrize("shards", [False, True])
def test_pickled_weights_are_read_where_that_is_asked_for(tmp_path: Path, shards: bool) -> None:
    decoder, model = pickled_model(tmp_path, shards=shards)
    flats = Flats(decoder)
    with pytest.raises(BadInput, match=r"no safetensors; pickled weights can run code .* or set allow_pickle: true"):
        weights.load(tmp_path, decoder.layout, flats.write, names=decoder.names)
    weights.load(tmp_path, decoder.layout, flats.write, names=decoder.names, allow_pickle=True)
    assert all((count == 1).all() for count in flats.writes)
    assert flats.longest == TILE
    assert_equal(flats.named(), state(model))


def test_a_pickle_that_would_run_something_is_refused_and_does_not(tmp_path: Path) -> None:
    decoder, _ = pickled_model(tmp_path)

    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "pwned",)

    for content in ({"a": Hostile()}, {"a": 1}, [torch.zeros(3)]):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(BadInput, match=r"pytorch_model.bin cannot be read as pickled weights \("):
            weights.check(tmp_path, decoder.layout, names=decoder.names, allow_pickle=True)
    for content in (b"", b"\x80\x04N.", b"not a pickle"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(BadInput, match=r"pytorch_model.bin cannot be read as pickled weights \("):
            weights.check(tmp_path, decoder.layout, names=decoder.names, allow_pickle=True)
    assert not (tmp_path / "pwned").exists()
