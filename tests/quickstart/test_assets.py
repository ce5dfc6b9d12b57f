"""Conversion of a GGUF file, and a cache that holds only what is whole and checked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as llama.cpp's converter lays them: half 1 and half 2 of each rotary pair side by side."""
    rows = weight.shape[0]
    out = torch.empty_like(weight)
    head = rows // num_heads
    for h in range(num_heads):
        for i in range(head // 2):
            out[h * head + 2 * i] = weight[h * head + i]
            out[h * head + 2 * i + 1] = weight[h * head + head // 2 + i]
    return out


def write_gguf(path: Path, model: LlamaForCausalLM, tokens: list[str], merges: list[str]) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = next(theirs for ours, theirs in NAMES.items() if ours in name)
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        values = interleaved(weight, heads[part]) if part in heads else weight
        writer.add_tensor(f"{block}{part}.weight", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_is_the_one_that_was_written(assets, tmp_path, tied) -> None:
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "ĠĠ", "12", "he"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        rope_theta=12345.0,
    )
    model = LlamaForCausalLM(config).eval()
    write_gguf(tmp_path / "model.gguf", model, tokens, ["Ġ Ġ", "1 2", "h e"])
    assets.convert(tmp_path / "model.gguf", tmp_path / "folder")

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(0, len(tokens), (2, 7))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert loaded.config.tie_word_embeddings == tied
    assert loaded.generation_config.eos_token_id == 2

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.tokenize("he  12") == ["he", "ĠĠ", "1", "2"]
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    assert tokenizer.decode(tokenizer("é 12")["input_ids"]) == "é 12"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"
    assert set(tokenizer("hi")) == {"input_ids", "attention_mask"}


def test_the_cache_never_holds_half_of_a_thing_and_makes_it_once(assets, tmp_path) -> None:
    target = tmp_path / "cache" / "thing"
    made = []

    def break_off(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("whole")

    with pytest.raises(KeyboardInterrupt):
        assets._once(target, break_off)
    assert list(target.parent.iterdir()) == []
    for _ in range(2):
        assert assets._once(target, make).read_text() == "whole"
    assert len(made) == 1
    assert list(target.parent.iterdir()) == [target]


def test_a_file_with_another_hash_is_refused(assets, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assets._check(path, hashlib.sha256(b"abc").hexdigest(), "it")
    with pytest.raises(SystemExit, match="it has sha256 ba7816bf.*, expected 0000: not used"):
        assets._check(path, "0000", "it")
