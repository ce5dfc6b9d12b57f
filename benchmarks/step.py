"""How long does one training step take? Ours, the stock model resident on the GPU, and the peers, in one call.

    python benchmarks/step.py --shape llama-3.2-3b --batch 32 --seq 1024 --gpu-limit 24 --out step.jsonl \\
        --cases optimizer link stock-fwd-bwd stock-resident ours-streamed:eager fsdp2 ours-streamed:deferred fsdp2:clip

Every case runs in a process of its own and adds one JSON line to --out, all under one `run`; `optimizer`, `link` and
`disk` are the benchmarks of those names. A case that is not installed says so and is passed over; one that does not fit
ends with 3, and the others go on. `--report FILE` prints the table of a file and exits with 1 where a line does not add
up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from cases import MODULES, NotHere, Settings, measure, missing, parse_case

BESIDE = {
    "optimizer": ["optimizer.py", "--only-native", "--numel", str(1 << 29)],
    "link": ["link.py"],
    "disk": "disk.py --folder . --gib 4 --seconds 0 --only loop store --sustain 20".split(),
}
"""Benchmarks that share a call's `run`. 2^29 parameters are 7 GB of state and gradient, far beyond any cache; the disk
is that of the working folder, where --offload-dir should be."""


def main() -> int:
    args = parse()
    if args.report:
        from report import report

        return report(Path(args.report))
    if args.worker:
        return worker(args)
    run, failed, status = uuid.uuid4().hex[:12], [], 0
    for name in args.cases:
        print(f"-- {name}", flush=True)
        if (ended := call(command_of(args, name, run), args.case_timeout)) != 0:
            failed.append(name)
            status = ended if status in (0, ended) else 1
    if args.out and Path(args.out).exists():
        command = [sys.executable, str(Path(__file__).parent / "report.py"), args.out, "--run", run]
        call([*command, *["--targets"] * args.watch], None)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return status


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """words: of one call; None is the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b", help="a name of shapes.py, or a config.json or its folder")
    parser.add_argument("--num-layers", type=int, help="cut the shape")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="the batch in so many pieces")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--gpu-limit", type=float, help="GiB, for ours; ours-auto-24 has its own")
    parser.add_argument("--limit-all", action="store_true", help="the limit holds for every case")
    parser.add_argument(
        "--max-grad-norm",
        type=float,
        default=1.0,
        help="of cases that clip: ours :deferred, others :clip; :deferred=0.1 has its own",
    )
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--no-liger", action="store_true", help="plain transformers blocks, but for ours")
    parser.add_argument("--kernels", default="auto", help="of ours; triton-rotary-glu: all but those two")
    parser.add_argument("--window", type=int, default=3, help="of ours")
    parser.add_argument("--tile-numel", type=int, default=16 << 20, help="of ours")
    parser.add_argument("--engine", nargs="+", default=[], metavar="KEY=VALUE", help="further EngineOptions of ours")
    parser.add_argument(
        "--offload",
        metavar="WHAT=SHARE,...",
        help="of ours, on disk: optimizer=0.5,weights=0,activations=0; blocks=0.5: all state of half of the blocks",
    )
    parser.add_argument(
        "--plan-layers", type=int, help="ours says what a plan of so many layers takes on the device, with its options"
    )
    parser.add_argument("--offload-dir", help="where that is; not there yet, its parent is")
    parser.add_argument(
        "--watch", action="store_true", help="50 steps; the report says what has changed since the third"
    )
    parser.add_argument("--trace", help="folder for a Chrome trace and a text timeline of one step of ours")
    parser.add_argument("--megatrain", help="folder of a checkout of MegaTrain")
    parser.add_argument("--cases", nargs="+", default=["stock-fwd-bwd", "ours-streamed:eager"])
    parser.add_argument("--case-timeout", type=float, help="seconds after which a case is ended and counts as failed")
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--report", metavar="FILE", help="print its tables; benchmarks/report.py has more to say")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    for name in args.cases:
        if name not in BESIDE:
            parse_case(name)
    if args.watch:
        args.warmup, args.steps = 2, 48
    if args.warmup < 1 or args.steps < 1:
        parser.error(f"--warmup is {args.warmup} and --steps {args.steps}, must be at least 1 each")
    if (args.offload is None) != (args.offload_dir is None):
        parser.error("--offload and --offload-dir go together")
    if args.batch % args.micro_batches:
        parser.error(f"--batch is {args.batch}, must be a multiple of --micro-batches ({args.micro_batches})")
    return args


def command_of(args: argparse.Namespace, name: str, run: str) -> list[str]:
    folder = Path(__file__).parent
    if name not in BESIDE:
        return [sys.executable, __file__, *sys.argv[1:], "--worker", name, "--run", run]
    script, *rest = BESIDE[name]
    out = ["--out", args.out] if args.out else []
    return [sys.executable, str(folder / script), *rest, "--run", run, *out]


def call(command: list[str], timeout_s: float | None) -> int:
    """Run a case in a process group of its own, which ends with it."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        ended = process.wait(timeout_s)
        if ended < 0:  # by somebody else; at a container's limit nobody says why
            why = f"a signal ({signal.Signals(-ended).name})" + ", perhaps for want of memory" * (
                ended == -signal.SIGKILL
            )
            print(f"ended: by {why}", file=sys.stderr, flush=True)
        return ended
    except subprocess.TimeoutExpired:
        print(f"ended: it ran for more than {timeout_s:g} s", file=sys.stderr, flush=True)
        return 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def settings_of(args: argparse.Namespace) -> Settings:
    name = parse_case(args.worker)
    limited = args.limit_all or MODULES[name.case] == "ours"
    return Settings(
        case=name.case,
        shape=args.shape,
        batch=args.batch,
        seq=args.seq,
        num_layers=args.num_layers,
        micro_batches=args.micro_batches,
        steps=args.steps,
        warmup=args.warmup,
        update=name.update,
        max_grad_norm=(name.max_grad_norm or args.max_grad_norm) if name.clips else 0.0,
        gpu_limit_gib=name.gpu_limit_gib or (args.gpu_limit if limited else None),
        device=args.device,
        cpu_threads=args.cpu_threads,
        liger=not args.no_liger,
        kernels=args.kernels,
        tile_numel=args.tile_numel,
        window=args.window,
        engine=dict(_option(text) for text in args.engine),
        offload=_shares(args.offload) if args.offload else {},
        offload_dir=args.offload_dir,
        plan_layers=args.plan_layers,
        trace=args.trace,
        megatrain=args.megatrain,
    )


def _option(text: str) -> tuple[str, object]:
    """`ring=8` as ("ring", 8), `keep=[1,2]` as ("keep", (1, 2)): values are JSON, or else words."""
    key, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--engine {text}: must be KEY=VALUE")
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        return key, value
    return key, tuple(found) if isinstance(found, list) else found


def _shares(text: str) -> dict[str, float]:
    """`optimizer=0.5,weights=0` as {"optimizer": 0.5, "weights": 0.0}."""
    found = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := found.keys() - {"optimizer", "weights", "activations", "blocks"}:
        raise SystemExit(
            f"--offload: no {', '.join(sorted(unknown))}; there are optimizer, weights, activations, and blocks"
        )
    if "blocks" in found and found.keys() & {"optimizer", "weights"}:
        raise SystemExit("--offload: blocks are whole, so there is no share of optimizer or weights beside them")
    shares = {name: float(share) for name, share in found.items()}
    if wrong := [f"{name}={share:g}" for name, share in shares.items() if not 0 <= share <= 1]:
        raise SystemExit(f"--offload: {', '.join(wrong)}, must be shares from 0 to 1")
    return shares


def worker(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if reason := missing(settings):  # before torch is imported: a peer that is not here should cost no time
        return _not_here(args.worker, reason)
    from torch import OutOfMemoryError

    from lines import shared, write
    from slideformer.errors import DoesNotFit

    called = sys.argv[: sys.argv.index("--worker")]
    try:
        measured = measure(settings)
    except NotHere as error:
        return _not_here(args.worker, str(error))
    except (DoesNotFit, MemoryError, OutOfMemoryError) as error:
        print(f"does not fit: {args.worker}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 3
    write(shared("step", args.run, called) | describe(settings, measured), args.out)
    return 0


def _not_here(name: str, reason: str) -> int:
    print(f"not here: {name}: {reason}", flush=True)
    return 0


def describe(settings: Settings, measured: dict[str, object]) -> dict[str, object]:
    """A line of results, but for what all benchmarks share: the settings, what was measured, and the rates."""
    from flops import model_flops
    from shapes import shape

    config = shape(settings.shape, num_layers=settings.num_layers)
    median = measured["step_s"]["median"]
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return {
        "case": settings.case,
        "shape": Path(settings.shape.removesuffix("/config.json")).name,
        "num_layers": config.num_hidden_layers,
        "batch": settings.batch,
        "micro_batches": settings.micro_batches,
        "seq": settings.seq,
        "update": settings.update,
        "max_grad_norm": settings.max_grad_norm,
        "gpu_limit_gib": settings.gpu_limit_gib,
        "steps": settings.steps,
        **measured,
        "params": num_params(config),
        "untied_table_params": table,
        "tokens_per_second": round(settings.batch * settings.seq / median, 1),
        "tflops": float(f"{model_flops(config, settings.batch, settings.seq) / median / 1e12:.4g}"),
    }


def num_params(config: object) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


if __name__ == "__main__":
    sys.exit(main())
