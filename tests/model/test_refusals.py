"""What cannot be trained right is refused with a sentence, before any weight is read."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, GPT2Config, JambaConfig, MixtralConfig, PretrainedConfig, T5Config

from families import FAMILIES
from model.odd_models import ODD, odd_config
from slideformer.errors import BadInput
from slideformer.model.decoder import Decoder, ModelRefused


def refusal(config: PretrainedConfig, **more: object) -> str:
    with pytest.raises(ModelRefused) as error:
        Decoder(config, dtype=more.pop("dtype", torch.float32), tile_numel=1000, **more)
    assert isinstance(error.value, BadInput)
    return str(error.value)


def test_dropout_in_the_config_is_refused_unless_disabled() -> None:
    assert refusal(GPT2Config(n_layer=2, n_embd=64, n_head=4)) == (
        "gpt2 trains with dropout (attn_pdrop = 0.1, embd_pdrop = 0.1, resid_pdrop = 0.1), and a block that is run "
        "again in backward would draw other masks; dropout must be 0: set disable_dropout: true to train without it."
    )
    config = FAMILIES["llama"](True)
    config.attention_dropout = 0.1
    assert "llama trains with dropout (attention_dropout = 0.1)" in refusal(config)
    for given in (GPT2Config(n_layer=2, n_embd=64, n_head=4), config):
        decoder = Decoder(given, dtype=torch.float32, tile_numel=1000, disable_dropout=True)
        found = {
            n: v for n, v in decoder.module_config.to_dict().items() if "drop" in n and not n.startswith("summary")
        }
        assert found and not any(found.values())
        assert not any(m.p for m in decoder._model.modules() if isinstance(m, torch.nn.Dropout))
        assert decoder.config.to_dict() == given.to_dict()  # what is saved keeps it


def test_dropout_that_only_a_module_knows_of_is_refused_unless_disabled() -> None:
    assert "odd trains with dropout (model.hidden_drop = 0.25)" in refusal(odd_config("dropout"))
    decoder = Decoder(odd_config("dropout"), dtype=torch.float32, tile_numel=1000, disable_dropout=True)
    assert decoder._model.model.hidden_drop.p == 0.0


def test_mixtures_of_experts_and_router_losses_are_refused() -> None:
    assert refusal(MixtralConfig()) == (
        "mixtral has num_local_experts = 8: a mixture of experts needs its router's balancing loss, which is not "
        "computed here; only dense models are trained: choose a dense one."
    )
    assert refusal(JambaConfig(num_experts=1)) == (
        "jamba has router_aux_loss_coef = 0.001: a router loss is not computed here and would be dropped in silence; "
        "only dense models are trained: choose one, or set router_aux_loss_coef to 0."
    )


def test_other_kinds_of_models_are_refused() -> None:
    assert refusal(T5Config()) == ("t5 is an encoder-decoder; only decoder-only models are trained: choose one.")
    assert refusal(AutoConfig.for_model("vit")) == (
        "vit has no causal language model in transformers; only AutoModelForCausalLM classes are trained: use the "
        "text-only checkpoint of this family, where there is one."
    )
    assert refusal(AutoConfig.for_model("gemma3")) == (
        "gemma3 has no num_hidden_layers of its own: it is put together from several models; only a text model with "
        "one list of blocks is trained: use the text-only checkpoint of this family, where there is one."
    )

    class Remote(PretrainedConfig):
        model_type = "homemade"

    assert refusal(Remote(auto_map={"AutoModelForCausalLM": "modeling.py"})) == (
        "homemade needs code that comes with the checkpoint (auto_map in config.json); only model classes that ship "
        "with transformers are run: use a checkpoint of a built-in architecture."
    )


def test_quantised_weights_are_refused() -> None:
    config = FAMILIES["llama"](True)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert refusal(config) == (
        "llama has quantised weights (quantization_config in config.json); full-parameter training needs float "
        "weights: start from the unquantised checkpoint."
    )


def test_a_checkpoint_that_names_code_but_is_built_in_is_accepted() -> None:
    config = FAMILIES["phi3"](True)
    config.auto_map = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    Decoder(config, dtype=torch.float32, tile_numel=1000)


def test_attention_that_the_model_lacks_is_refused() -> None:
    text = refusal(FAMILIES["llama"](True), attn_implementation="no_such_attention")
    assert text.startswith("llama cannot be built with attn_implementation 'no_such_attention': ")


@pytest.mark.parametrize("oddity", sorted(name for name, odd in ODD.items() if odd.refusal))
def test_models_of_another_build_are_refused(oddity: str) -> None:
    assert refusal(odd_config(oddity)) == ODD[oddity].refusal


def test_parameters_of_another_type_are_refused() -> None:
    assert refusal(odd_config("float32"), dtype=torch.bfloat16) == (
        "odd keeps model.layers.0.mlp.gain in float32 when the model is in bfloat16; a unit's weights are all of one "
        "type: train in float32, or choose another model."
    )
    Decoder(odd_config("float32"), dtype=torch.float32, tile_numel=1000)


def test_patterns_of_frozen_parameters_must_match_some_and_not_all() -> None:
    config = FAMILIES["llama"](True)
    assert refusal(config, frozen=("norm", "no_such")) == (
        "frozen pattern 'no_such' matches none of the model's 38 parameters, which are named like "
        "model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight and 35 "
        "more: correct or remove it."
    )
    assert refusal(config, frozen=("norm", "proj|embed")) == (
        "frozen patterns 'norm', 'proj|embed' match all 38 parameters, so nothing would be trained: narrow them."
    )
    assert refusal(config, frozen=("(",)).startswith("frozen pattern '(' is not a regular expression (")
