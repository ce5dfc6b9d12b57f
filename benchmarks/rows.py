"""How fast do rows become token ids, how fast are they found again, and what memory do they take?

    python benchmarks/rows.py --model FOLDER [--rows N] [--kind chat|tokens] [--num-proc N] [--packing] --out rows.jsonl

One JSON line: rows of a generated file (of one seed) encoded with the tokenizer of a model folder, found again in the
cache, and made into the first step; growth of this process's own memory, and of what it has mapped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from lines import host_peak_gib, new_run, shared, write
from slideformer.config import TrainConfig
from slideformer.data import codec_of, load_dataset, training_batches

WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they".split()
)
MIB = 2**20


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        _write_rows(path, args.kind, args.rows)
        config = TrainConfig(
            model_name_or_path=args.model,
            dataset=str(path),
            max_length=args.max_length,
            packing=args.packing,
            dataset_num_proc=args.num_proc,
            dataset_cache_dir=f"{folder}/cache",
        )
        codec = codec_of(config)
        before_mib = _own_mib()
        start = time.perf_counter()
        dataset = load_dataset(config, codec)
        encode_s = time.perf_counter() - start
        start = time.perf_counter()
        dataset = load_dataset(config, codec)
        found_again_s = time.perf_counter() - start
        start = time.perf_counter()
        batches = training_batches(dataset, config, codec)
        batches.step(0)
        first_step_s = time.perf_counter() - start
        (report,) = dataset.reports
        line = {
            **shared("rows", new_run(), sys.argv),
            "case": args.kind,
            "rows": args.rows,
            "tokens": report.tokens,
            "num_proc": args.num_proc,
            "packing": args.packing,
            "encode_s": round(encode_s, 3),
            "rows_per_s": round(args.rows / encode_s, 1),
            "found_again_s": round(found_again_s, 3),
            "first_step_s": round(first_step_s, 3),
            "own_growth_mib": round(_own_mib() - before_mib, 1),
            "host_peak_gib": host_peak_gib(),
        }
        write(line, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--kind", choices=("chat", "tokens"), default="chat")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--num-proc", type=int, default=1)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--out")
    return parser.parse_args()


def _write_rows(path: Path, kind: str, count: int) -> None:
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            if kind == "tokens":
                row: dict[str, object] = {"input_ids": chance.choices(range(200), k=chance.randint(8, 24))}
            else:
                asked, answered = (" ".join(chance.choices(WORDS, k=k)) for k in (25, 60))
                row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}
            file.write(json.dumps(row) + "\n")


def _own_mib() -> float:
    """Memory of this process that no file is mapped into (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / MIB


if __name__ == "__main__":
    main()
