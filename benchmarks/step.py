"""How long does one training step take? Ours streamed, and the stock model resident on the GPU, in one call.

    python benchmarks/step.py --shape llama-3.2-3b --batch 32 --seq 1024 --gpu-limit 24 \\
        --cases stock-fwd-bwd stock-resident ours-streamed:eager ours-streamed:deferred

Every case runs in a fresh process and appends one JSON line to --out; `--report FILE` prints the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from shapes import random_tokens, random_weight, shape
from slideformer.device import Device, open_device

GIB = 2**30


def main() -> int:
    args = parse()
    if args.report:
        return report(Path(args.report))
    if args.worker:
        return worker(args)
    run, status = uuid.uuid4().hex[:12], 0
    for case in args.cases:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", case, "--run", run]
        print(f"-- {case}", flush=True)
        status |= subprocess.run(command, check=False).returncode
    if args.out:
        report(Path(args.out))
    return status


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="the batch in so many pieces")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-limit", type=float, help="GiB, for ours")
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--grad-slots", type=int, default=2)
    parser.add_argument("--ring", type=int, default=8)
    parser.add_argument("--tile-numel", type=int, default=16 << 20)
    parser.add_argument("--saved-on-device", type=int)
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="of deferred runs; eager ones do not clip")
    parser.add_argument("--no-ahead", action="store_true", help="deferred runs wait for the norm with every update")
    parser.add_argument("--stock-kernels", action="store_true", help="no Liger kernels")
    parser.add_argument("--trace", help="folder for a Chrome trace and a text timeline of one step")
    parser.add_argument("--cases", nargs="+", default=["stock-fwd-bwd", "ours-streamed:eager"])
    parser.add_argument("--out")
    parser.add_argument("--report")
    parser.add_argument("--worker")
    parser.add_argument("--run")
    return parser.parse_args()


def worker(args: argparse.Namespace) -> int:
    case, _, update = args.worker.partition(":")
    line = {
        "bench": "step",
        "case": case,
        "run": args.run,
        "commit": os.environ.get("COMMIT") or _git("rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"{args.worker}, from: " + " ".join(["step.py", *sys.argv[1 : sys.argv.index("--worker")]]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "shape": args.shape,
        "batch": args.batch,
        "micro_batches": args.micro_batches,
        "seq": args.seq,
        "gpu_limit_gib": args.gpu_limit if case.startswith("ours") else None,
        "update": update or None,
        "max_grad_norm": args.max_grad_norm if update == "deferred" else 0.0,
        "steps": args.steps,
    }
    measure = ours if case.startswith("ours") else stock
    line.update(measure(args, case, update))
    line["model_tflops"] = round(model_flops(args) / line["step_s"]["median"] / 1e12, 1)
    line["tokens_per_second"] = round(args.batch * args.seq / line["step_s"]["median"])
    text = json.dumps(line)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "a") as file:
            file.write(text + "\n")
    print(text, flush=True)
    return 0


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def model_flops(args: argparse.Namespace) -> float:
    """Matrix products of the model, forward x 3, causal attention counted half, recompute not counted."""
    c = shape(args.shape, num_layers=args.num_layers)
    heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, getattr(c, "head_dim", None)
    dim = dim or c.hidden_size // heads
    per_token = c.num_hidden_layers * (
        2 * c.hidden_size * dim * (2 * heads + 2 * kv) + 6 * c.hidden_size * c.intermediate_size
    )
    per_token += 2 * c.hidden_size * c.vocab_size
    attention = c.num_hidden_layers * 2 * 2 * heads * dim * args.seq / 2
    return 3.0 * args.batch * args.seq * (per_token + attention)


def timed(args: argparse.Namespace, step: Callable[[int], float | None], synchronize: Callable[[], None]) -> dict:
    """Step times from one step's loss to the next's; warm-up steps first."""
    losses, times = [], []
    for index in range(args.warmup):
        losses.append(step(index))
    synchronize()
    last = time.perf_counter()
    for index in range(args.warmup, args.warmup + args.steps):
        losses.append(step(index))
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return {"losses": losses, "times": times}


def spread(times: list[float]) -> dict[str, float]:
    return {"min": round(min(times), 4), "median": round(statistics.median(times), 4), "max": round(max(times), 4)}


def host_peak_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2)


def ours(args: argparse.Namespace, case: str, update: str) -> dict:
    from slideformer.data.batches import MicroBatch
    from slideformer.engine import Engine, EngineOptions
    from slideformer.model.decoder import Decoder

    config = shape(args.shape, num_layers=args.num_layers)
    with open_device(args.device) as device:
        cuda = device.kind == "cuda"
        if cuda and args.gpu_limit:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(args.gpu_limit * GIB / total)
        rss_before = host_peak_gib()
        decoder = Decoder(
            config,
            dtype=torch.bfloat16 if cuda else torch.float32,
            tile_numel=args.tile_numel,
            use_liger_kernel=cuda and not args.stock_kernels,
            device=device.torch_device,
        )
        options = EngineOptions(
            micro_batch_size=args.batch // args.micro_batches,
            max_length=args.seq,
            micro_batches=args.micro_batches,
            window=args.window,
            grad_slots=args.grad_slots,
            ring=args.ring,
            saved_on_device=args.saved_on_device,
            update=update or "eager",
            max_grad_norm=0.0 if update != "deferred" else args.max_grad_norm,
            cpu_threads=args.cpu_threads,
            ahead=() if args.no_ahead else "auto",
        )
        began = time.perf_counter()
        with Engine(decoder, device, options) as engine:
            allocated_s = time.perf_counter() - began
            for index, unit in enumerate(decoder.layout.units):
                for param in unit.params:
                    values = random_weight(param.name, param.shape, device.torch_device).cpu().flatten()
                    engine.write(index, unit.offsets[param.name], values)
            ready_s = time.perf_counter() - began
            return _ours_steps(args, engine, device, decoder.vocab_size, rss_before, MicroBatch, allocated_s, ready_s)


def _ours_steps(args, engine, device: Device, vocab: int, rss_before, micro_batch, allocated_s, ready_s) -> dict:
    rows = args.batch // args.micro_batches

    def batch(index: int) -> list:
        tokens = random_tokens(index, args.batch, args.seq, vocab)
        return [micro_batch(t, t) for t in tokens.split(rows)]

    batches = [batch(i) for i in range(args.warmup + args.steps)]
    results, times, losses, norms, marks = [], [], [], [], []

    def finish(result) -> None:
        losses.append(result.loss)
        norms.append(result.grad_norm)
        result.wait()
        times.append(time.perf_counter())
        marks.append(_marks(device, engine))

    for index, item in enumerate(batches):
        results = [*results[-3:], engine.step(item, lr=1e-5)]
        if index:  # the step before: its results are read while this one is queued behind it
            finish(results[-2])
    finish(results[-1])
    steps = [b - a for a, b in zip(times, times[1:], strict=False)][args.warmup - 1 :]
    traced = results[-2]
    busy = {str(k): round(v / statistics.median(steps), 3) for k, v in traced.busy_s().items()}
    if args.trace:
        _write_trace(args, results[-3:])
    memory = engine.memory()
    return {
        "loss": [round(x, 5) for x in losses],
        "grad_norm": [round(x, 4) for x in norms],
        "step_s": spread(steps),
        "busy": busy,
        "gpu_peak_gib": round(device.peak_nbytes() / GIB, 2),
        "gpu_reserved_gib": round(getattr(device, "reserved_nbytes", lambda: 0)() / GIB, 2),
        "host_peak_gib": host_peak_gib(),
        "host_before_gib": rss_before,
        "pinned_gib": round(device.page_locked_nbytes / GIB, 2),
        "plan_gib": {k: round(v / GIB, 3) for k, v in memory.items()},
        "cpu_threads": engine.kernels.threads,
        "isa": engine.kernels.isa,
        "window": engine.step_options.window,
        "num_ops": len(engine.plan.ops),
        "ahead_units": len(engine.step_options.ahead),
        "watch": {key: [min(m[key] for m in marks[2:]), max(m[key] for m in marks[2:])] for key in marks[0]},
        "allocated_s": round(allocated_s, 1),
        "ready_s": round(ready_s, 1),
    }


def _marks(device: Device, engine) -> dict:
    """What must not change from step to step; the line has the least and the most of steps 3 to the last."""
    watch = {"pinned": device.page_locked_nbytes}
    if device.kind == "cuda":
        stats = torch.cuda.memory_stats()
        watch["segments"] = stats["segment.all.current"]
        watch["reserved"] = stats["reserved_bytes.all.current"]
    watch["slots"] = hash(tuple(t.data_ptr() for t in engine.executor.buffers.values() if isinstance(t, torch.Tensor)))
    rss = next(int(s.split()[1]) for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmRSS"))
    watch["rss_mib"] = rss // 1024
    return watch


def _write_trace(args: argparse.Namespace, results: list) -> None:
    folder = Path(args.trace)
    folder.mkdir(parents=True, exist_ok=True)
    name = args.worker.replace(":", "-")
    timelines = [r.timeline() for r in results]
    (folder / f"{name}.json").write_text(timelines[1].chrome_trace())
    text = timelines[1].text(width=150)
    first_upload = min(s.start_s for s in timelines[2].spans if s.op.kind == "upload")
    last_update = max(s.end_s for s in timelines[1].spans if s.op.lane == "update")
    text += (
        f"\nnext step's first upload starts {last_update - first_upload:.4f} s before this step's last update ends\n"
    )
    (folder / f"{name}.txt").write_text(text)
    print(text, flush=True)


def stock(args: argparse.Namespace, case: str, update: str) -> dict:
    """transformers with Liger kernels, every block checkpointed, everything on the GPU in bf16."""
    from transformers import AutoModelForCausalLM

    config = shape(args.shape, num_layers=args.num_layers)
    config.use_cache = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if device.type == "cuda" and not args.stock_kernels:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(random_weight(name, tuple(param.shape), device))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = None
    if case == "stock-resident":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

    def step(index: int) -> float:
        tokens = random_tokens(index, args.batch, args.seq, config.vocab_size).to(device)
        total = 0.0
        for part in tokens.split(args.batch // args.micro_batches):
            loss = model(input_ids=part, labels=part).loss / args.micro_batches
            loss.backward()
            total += loss.detach()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return float(total)

    done = timed(args, step, torch.cuda.synchronize if device.type == "cuda" else lambda: None)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    return {
        "loss": [round(x, 5) for x in done["losses"]],
        "step_s": spread(done["times"]),
        "gpu_peak_gib": round(peak, 2),
        "host_peak_gib": host_peak_gib(),
        "pinned_gib": 0.0,
        "cpu_threads": 0,
        "busy": {},
    }


def report(path: Path) -> int:
    """Print the lines of a file as a table; ratios are to stock-fwd-bwd of the same call."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    base = {x["run"]: x["step_s"]["median"] for x in lines if x["case"] == "stock-fwd-bwd"}
    head = f"{'shape':14} {'batch':>9} {'case':24} {'step s':>8} {'ratio':>6} {'tok/s':>8} {'GPU':>6} {'host':>6}  busy"
    print(head)
    for x in lines:
        name = x["case"] + (f":{x['update']}" if x.get("update") else "")
        ratio = x["step_s"]["median"] / base[x["run"]] if x["run"] in base else float("nan")
        busy = " ".join(f"{k}={v:.2f}" for k, v in x["busy"].items() if v > 0.005)
        size = f"{x['batch']}x{x['seq']}"
        print(
            f"{x['shape']:14} {size:>9} {name:24} {x['step_s']['median']:8.3f} {ratio:6.3f} "
            f"{x['tokens_per_second']:8d} {x['gpu_peak_gib']:6.1f} {x['host_peak_gib']:6.1f}  {busy}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
