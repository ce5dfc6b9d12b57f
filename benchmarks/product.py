"""Does `slideformer train`, on a file of rows, train as fast as the benchmark of the engine alone?

    python benchmarks/product.py --shape llama-3.2-3b --batch 32 --gpu-limit 24 --out product.jsonl

Makes a model folder of a shape with random weights, a tokenizer of as many words as fit its vocabulary, and a JSONL
file of texts that fill every row; trains on it as a user would, and runs the same step with step.py, both with the
same settings, under one `run`. The line has tokens/s of both and their ratio, the target of which is 0.97.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from cases import parse_case
from lines import new_run, shared, spread, write
from shapes import random_weight, shape
from targets import Target

LEAST = 0.97
WARMUP = 3
WINDOW, RING, GRAD_SLOTS = 3, 8, 2


def make_model(folder: Path, config: PretrainedConfig, device: str) -> None:
    """config.json, one file of bf16 weights a block, and their index."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    config.dtype, config.architectures = "bfloat16", [type(model).__name__]
    config.save_pretrained(folder)
    files: dict[str, list[str]] = {}
    for name in shapes:
        part = next((word for word in name.split(".") if word.isdigit()), "rest")
        files.setdefault(f"model-{part}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({n: random_weight(n, shapes[n], device).cpu() for n in names}, folder / file, {"format": "pt"})
    index = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make_tokenizer(folder: Path, num_words: int) -> None:
    """One token a word, w0 and on; the last id ends a text."""
    words = {f"w{i}": i for i in range(num_words - 1)} | {"</s>": num_words - 1}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", pad_token="</s>").save_pretrained(folder)


def make_rows(path: Path, num: int, length: int, num_words: int) -> None:
    """Texts somewhat longer than a row, so that none has padding."""
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(num):
            words = chance.choices(range(num_words - 1), k=length + 8)
            file.write(json.dumps({"text": " ".join(f"w{w}" for w in words)}) + "\n")


def train(args: argparse.Namespace, folder: Path, steps: int) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    case = parse_case(args.case)
    settings: dict[str, object] = {
        "model_name_or_path": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "dataset_cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
        "max_length": args.seq,
        "per_device_train_batch_size": args.batch,
        "max_steps": steps,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "update": case.update,
        "max_grad_norm": 1.0 if case.clips else 0,
        "placement": {"ours-streamed": "stream", "ours-resident": "resident", "ours-auto": "auto"}[case.case],
        "window": WINDOW,
        "ring": RING,
        "grad_slots": GRAD_SLOTS,
        "tile_numel": args.tile_numel,
        "device": args.device,
        "max_gpu_memory": None if args.gpu_limit is None else f"{args.gpu_limit:g}GiB",
    }
    (folder / "train.yaml").write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, "-m", "slideformer", "train", str(folder / "train.yaml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"slideformer train ended with {done.returncode}:\n{done.stdout[-3000:]}")
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [line for text in lines if (line := json.loads(text)).get("step_time")]


def engine_alone(args: argparse.Namespace, run: str, out: Path) -> dict[str, object]:
    """step.py's line of the same step."""
    words = ["--shape", args.shape, "--batch", args.batch, "--seq", args.seq, "--steps", args.steps, "--out", out]
    words += ["--num-layers", args.num_layers] if args.num_layers else []
    words += ["--gpu-limit", args.gpu_limit] if args.gpu_limit else []
    words += ["--window", WINDOW, "--engine", f"ring={RING}", f"grad_slots={GRAD_SLOTS}"]
    words += ["--tile-numel", args.tile_numel, "--device", args.device, "--worker", args.case, "--run", run]
    step = Path(__file__).parent / "step.py"
    subprocess.run([sys.executable, str(step), *map(str, words)], stdout=subprocess.DEVNULL, check=True)
    return json.loads(out.read_text().splitlines()[-1])


def main() -> int:
    args = _arguments()
    config, run, steps = shape(args.shape, num_layers=args.num_layers), new_run(), WARMUP + args.steps
    device = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_model(folder / "model", config, device)
        make_tokenizer(folder / "model", config.vocab_size)
        make_rows(folder / "rows.jsonl", args.batch * steps, args.seq, config.vocab_size)
        lines = train(args, folder, steps)
        alone = engine_alone(args, run, folder / "step.jsonl")
    seen = [b["num_input_tokens_seen"] - a["num_input_tokens_seen"] for a, b in pairwise(lines)]
    if set(seen) != {args.batch * args.seq}:
        raise SystemExit(f"a step has {sorted(set(seen))} tokens, must have {args.batch * args.seq}: rows are not full")
    took = [line["step_time"] for line in lines[WARMUP:]]
    rate = round(args.batch * args.seq / statistics.median(took), 1)
    line = shared("product", run, sys.argv) | {
        "case": alone["case"],
        **{
            key: alone[key]
            for key in ("shape", "num_layers", "batch", "seq", "update", "max_grad_norm", "gpu_limit_gib")
        },
        "steps": len(took),
        "step_s": spread(took),
        "tokens_per_second": rate,
        "engine_tokens_per_second": alone["tokens_per_second"],
        "engine_step_s": alone["step_s"],
        "cpu_threads": alone["cpu_threads"],
    }
    write(line, args.out)
    print(Target("train's tokens/s over the engine's alone", rate / alone["tokens_per_second"], LEAST, least=True))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--num-layers", type=int, help="cut the shape")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--case", default="ours-auto:deferred", help="ours-streamed, ours-resident; also :eager")
    parser.add_argument("--gpu-limit", type=float, help="GiB")
    parser.add_argument("--tile-numel", type=int, default=16 << 20)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--folder", help="where the model is made; a temporary folder is removed again")
    parser.add_argument("--out", help="file that the line is added to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
