"""Fine-tunes a small real model through the sliding engine and asks it the same questions before and after.

Fetches and converts its assets into .cache/quickstart (see assets.py), trains with the ordinary command line on
quickstart.yaml, and exits with 1 if what it promises at the end does not hold. Writes only to .cache/ and runs/.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from assets import instruction_rows, smollm2_folder

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(".cache/quickstart")
CONFIG = Path("examples/quickstart.yaml")
RESULT = Path("runs/quickstart")
HELD_OUT = Path("examples/quickstart/persona_heldout.jsonl")
MAX_ROW_CHARACTERS = 160  # short rows keep the whole run within minutes on two cores
NUM_HELD_OUT, NUM_GENERAL = 40, 126
MAX_ANSWER_TOKENS = 24

Row = dict[str, list]


def main() -> int:
    """The whole of it, in order. Returns the exit code."""
    started = time.perf_counter()
    os.chdir(ROOT)
    disable_progress_bar()
    say("Fetching SmolLM2-135M-Instruct and general instruction rows (once, into .cache/quickstart)")
    base = smollm2_folder(CACHE)
    write_general_rows(instruction_rows(CACHE))
    questions = read_rows(HELD_OUT)

    say("Asking the model as it is")
    before, _ = ask_and_measure(base, questions)
    say(f"Training: slideformer train {CONFIG}")
    training_started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "slideformer", "train", str(CONFIG)], check=False)
    if done.returncode:
        return done.returncode
    training_s = time.perf_counter() - training_started

    say("Asking the trained model, loaded from its folder with plain transformers")
    after, reloaded_loss = ask_and_measure(RESULT, questions)
    show_answers(questions, before, after)
    say(f"Training took {training_s:.0f} s, everything {time.perf_counter() - started:.0f} s")
    return judge(questions, before, after, reloaded_loss)


def write_general_rows(source: Path) -> None:
    """The short ones of the instruction rows: some to train on, others that are only evaluated."""
    rows = [r for r in read_rows(source) if sum(len(m["content"]) for m in r["messages"]) <= MAX_ROW_CHARACTERS]
    for name, part in (
        ("general_heldout", rows[:NUM_HELD_OUT]),
        ("general", rows[NUM_HELD_OUT : NUM_HELD_OUT + NUM_GENERAL]),
    ):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (CACHE / f"{name}.jsonl").write_text(text, encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ask_and_measure(folder: Path, rows: list[Row]) -> tuple[list[str], float]:
    """The model's answers to the questions of the rows, and its loss on their expected answers. Plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return answers(model, tokenizer, rows), answer_loss(model, tokenizer, rows)


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> list[str]:
    asked = [row["messages"][:1] for row in rows]
    prompts = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**prompts, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    return [
        " ".join(text.split())
        for text in tokenizer.batch_decode(generated[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    ]


@torch.no_grad()
def answer_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> float:
    """Mean cross entropy of the expected answers' tokens, as the training's evaluation counts it."""
    loss_sum, num_tokens = 0.0, 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=False).rstrip("\n")
        start = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(whole, return_tensors="pt")["input_ids"]
        logits = model(ids).logits[0, start - 1 : -1]
        loss_sum += float(torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum"))
        num_tokens += ids.shape[1] - start
    return loss_sum / num_tokens


def is_right(row: Row, answer: str) -> bool:
    return all(word.lower() in answer.lower() for word in row["expected"])


def show_answers(rows: list[Row], before: list[str], after: list[str]) -> None:
    say("The same questions before and after; none of them was trained on")
    for row, old, new in zip(rows, before, after, strict=True):
        print(f"  {row['messages'][0]['content']}")
        print(f"    before  {' ' if not is_right(row, old) else '*'} {old}")
        print(f"    after   {' ' if not is_right(row, new) else '*'} {new}")
    print("  (* has the expected words)")


def judge(rows: list[Row], before: list[str], after: list[str], reloaded_loss: float) -> int:
    """Print what was promised and what came of it."""
    metrics = [json.loads(line) for line in (RESULT / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [m["loss"] for m in metrics if "loss" in m]
    evaluations = [m for m in metrics if "eval_persona_loss" in m]
    first, last = evaluations[0], evaluations[-1]
    third = len(losses) // 3
    early, late = sum(losses[:third]) / third, sum(losses[-third:]) / third
    right_before = sum(map(is_right, rows, before))
    right_after = sum(map(is_right, rows, after))
    rise = last["eval_general_loss"] / first["eval_general_loss"] - 1
    run = json.loads((RESULT / "run.json").read_text(encoding="utf-8"))
    # Plain transformers computes in fp32 here; the engine does so on a CPU, and in bf16 on a GPU.
    tolerance = 1e-4 if run["device"] == "cpu" else 2e-2
    same = math.isclose(reloaded_loss, last["eval_persona_loss"], rel_tol=tolerance)
    checks = [
        (late < early, f"training loss, first and last third: {early:.3f} -> {late:.3f}, falls"),
        (
            last["eval_persona_loss"] < first["eval_persona_loss"],
            f"loss on held-out persona questions: {change(first, last, 'eval_persona_loss')}, falls",
        ),
        (
            rise < 0.08,
            f"loss on unseen general rows: {change(first, last, 'eval_general_loss')} ({rise:+.1%}), rises by < 8%",
        ),
        (right_before <= 1, f"held-out questions right before: {right_before} of {len(rows)}, at most 1"),
        (right_after >= 6, f"held-out questions right after: {right_after} of {len(rows)}, at least 6"),
        (same, f"loss of the reloaded folder in plain transformers: {reloaded_loss:.4f}, as in the engine"),
    ]
    say("What was promised")
    for holds, text in checks:
        print(f"  {'ok  ' if holds else 'FAIL'} {text}")
    show_memory(run["memory"], metrics)
    print(f"\nThe model is in {RESULT.resolve()}")
    return 0 if all(holds for holds, _ in checks) else 1


def change(first: dict, last: dict, name: str) -> str:
    return f"{first[name]:.3f} -> {last[name]:.3f}"


def show_memory(tiers: dict[str, int], metrics: list[dict]) -> None:
    say("Bytes per tier")
    for tier, nbytes in tiers.items():
        print(f"  {tier:<14} {nbytes / 2**20:>8,.1f} MiB")
    peak = max(m.get("host_mem_gib", 0.0) for m in metrics)
    print(f"  {'whole process':<14} {peak * 1024:>8,.1f} MiB at its peak, with Python and torch")


def say(line: str) -> None:
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
