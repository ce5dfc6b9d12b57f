"""Does a run here follow the same curve as TRL's SFTTrainer, on the same rows in the same order?

    python benchmarks/against_trl.py [--steps N] [--rows-per-step N] [--max-length N] --out FOLDER

SmolLM2-135M-Instruct on short rows of alpaca_en_demo, in fp32 on the CPU. Each side tokenises and masks for itself; it
is given text, the order of the rows, and the same schedule. Writes against_trl.json (counts of target tokens, losses,
gradient norms, learning rates of both) and against_trl.png; exits with 1 when a count differs, or a loss by more than
LOSS_RTOL. Needs trl and accelerate, which nothing else here does, and matplotlib. Each side has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/quickstart"
PROMPT = "### Instruction:\n{}\n\n### Response:\n"
MAX_CHARACTERS = 200  # of a row: short ones keep 200 steps of both sides within an hour of two cores
LEARNING_RATE, WARMUP_STEPS = 5e-5, 10
# Both sides are fp32 and sum in different orders, 1e-7 a sum; AdamW divides small gradients by their own size, so the
# difference grows from step to step. 1.5e-5 was the most over 200 steps (2 cores, Sapphire Rapids, 2026-11-30).
LOSS_RTOL = 1e-4


def main() -> int:
    """Prepare, run both sides, compare. Returns the exit code."""
    options = _options()
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    if options.side:
        {"ours": ours, "trl": trl}[options.side](options)
        return 0
    for side in ("ours", "trl"):  # ours first: it says in which order the rows come
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        done = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": _path()})
        if done.returncode:
            return done.returncode
    return compare(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows-per-step", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    return parser.parse_args()


def _path() -> str:
    mine = [str(ROOT / "src"), str(ROOT / "examples")]
    return os.pathsep.join([*mine, *filter(None, [os.environ.get("PYTHONPATH")])])


def rows() -> list[dict[str, str]]:
    """Prompts and completions, in the file's order."""
    from assets import instruction_rows

    lines = instruction_rows(CACHE).read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        *asked, answer = json.loads(line)["messages"]
        prompt = PROMPT.format(asked[-1]["content"])
        if len(asked) == 1 and len(prompt) + len(answer["content"]) <= MAX_CHARACTERS:
            found.append({"prompt": prompt, "completion": answer["content"]})
    return found


def ours(options: argparse.Namespace) -> None:
    """Train here; writes order.json and ours.json."""
    from assets import smollm2_folder
    from slideformer import TrainConfig, Trainer
    from slideformer.train.console import PlainConsole

    config = TrainConfig(
        output_dir=str(options.out / "ours"),
        device="cpu",
        max_steps=options.steps,
        per_device_train_batch_size=options.rows_per_step,
        max_length=options.max_length,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_STEPS,
        max_grad_norm=1.0,
    )
    model = str(smollm2_folder(CACHE))
    with PlainConsole(sys.stdout) as console, Trainer(model, config, rows(), console=console) as trainer:
        batches = trainer.prepare(console).batches
        names = [name for step in range(options.steps) for name in batches.step(step).rows]
        order = [int(name.rpartition(":")[2]) - 1 for name in names]
        (options.out / "order.json").write_text(json.dumps(order))
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
    seen = [0, *(line["num_target_tokens_seen"] for line in lines)]
    found = {
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "learning_rate": [line["learning_rate"] for line in lines],
        "target_tokens": [after - before for before, after in zip(seen, seen[1:], strict=False)],
    }
    (options.out / "ours.json").write_text(json.dumps(found))


def trl(options: argparse.Namespace) -> None:
    """Train in TRL on the rows in the order that ours took; writes trl.json."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from assets import smollm2_folder

    model = smollm2_folder(CACHE)
    every = rows()
    ordered = Dataset.from_list([every[i] for i in json.loads((options.out / "order.json").read_text())])
    config = SFTConfig(
        output_dir=str(options.out / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=options.rows_per_step,
        max_length=options.max_length,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_STEPS,
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=ordered,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in trainer.get_train_dataloader()]
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    found = {name: [float(line[name]) for line in lines] for name in ("loss", "grad_norm", "learning_rate")}
    (options.out / "trl.json").write_text(json.dumps({**found, "target_tokens": counts, "trl": version("trl")}))


def compare(folder: Path) -> int:
    """Print and draw both. Returns the exit code."""
    mine, theirs = (json.loads((folder / f"{side}.json").read_text()) for side in ("ours", "trl"))
    differences = [abs(a - b) / b for a, b in zip(mine["loss"], theirs["loss"], strict=True)]
    same_counts = mine["target_tokens"] == theirs["target_tokens"]
    result = {
        "steps": len(mine["loss"]),
        "target_tokens": [sum(mine["target_tokens"]), sum(theirs["target_tokens"])],
        "same_target_tokens_in_every_step": same_counts,
        "largest_relative_difference_of_the_loss": max(differences),
        "last_loss": [mine["loss"][-1], theirs["loss"][-1]],
        "versions": {"trl": theirs["trl"], **{name: version(name) for name in ("torch", "transformers")}},
        "ours": mine,
        "trl": theirs,
    }
    (folder / "against_trl.json").write_text(json.dumps(result) + "\n")
    draw(mine, theirs, folder / "against_trl.png")
    print(json.dumps({k: v for k, v in result.items() if k not in ("ours", "trl")}, indent=2))
    return 0 if same_counts and max(differences) <= LOSS_RTOL else 1


def draw(mine: dict[str, list[float]], theirs: dict[str, list[float]], path: Path) -> None:
    """Both curves over each other, and their distance below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(mine["loss"]) + 1)
    above.plot(steps, theirs["loss"], label="TRL SFTTrainer", linewidth=3.5, alpha=0.45, color="tab:orange")
    above.plot(steps, mine["loss"], label="slideformer", linewidth=1.1, color="tab:blue")
    above.set_ylabel("loss per target token")
    above.legend()
    relative = [abs(a - b) / b for a, b in zip(mine["loss"], theirs["loss"], strict=True)]
    below.semilogy(steps, [max(r, 1e-9) for r in relative], linewidth=1, color="tab:gray")
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
