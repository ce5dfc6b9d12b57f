"""Many calls of step.py with little between them: engines of one process share its imports, memory and measurements.

    python benchmarks/campaign.py CALLS --out step.jsonl [--seconds 500]

CALLS is a file with a call a line: words of step.py, such as `--batch 32 --cases stock-fwd-bwd ours-streamed-24:eager
fsdp2`; # begins a comment. Lines are what step.py writes, with a `run` for each call, in the order of the file; calls
of one `--run NAME` share theirs, so that slow peers may come last. All cases of ours are measured in one process, one
engine after another over the same host memory (pool.py), so that only the first of them can say what it took there; all
of the stock model in another; every peer in one of its own, which ends with its call, and before which that of ours
ends: it holds memory. `optimizer` and `link` are measured once, for all calls that name them. calls/ has files for
machines that docs/performance.md speaks of.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import step
from cases import MODULES, Settings, missing, parse_case

HOST_NBYTES = {"eager": 12.5, "deferred": 27.0}
"""Of the pool, a parameter: the state and some for what lies beside it; gradients in waiting and second copies too."""

LASTING = ("ours", "stock")
"""Kinds of workers that stay for all calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the file."""

    words: tuple[str, ...]
    args: argparse.Namespace
    run: str


def read_calls(path: Path) -> list[Call]:
    """Raises SystemExit for words that step.py does not take."""
    runs: dict[str, str] = {}
    calls = []
    for line in path.read_text().splitlines():
        if words := shlex.split(line, comments=True):
            args, run = step.parse(words), uuid.uuid4().hex[:12]
            calls.append(Call(tuple(words), args, runs.setdefault(args.run, run) if args.run else run))
    return calls


def settings_of(call: Call, name: str) -> Settings:
    return step.settings_of(argparse.Namespace(**{**vars(call.args), "worker": name}))


def kind_of(name: str) -> str:
    """Which worker measures a case."""
    return MODULES[parse_case(name).case]


class Worker:
    """A process that measures cases of one kind, one by one, as it is told. Answers are JSON, a line each."""

    def __init__(self, kind: str, calls: Path, out: str | None) -> None:
        command = [sys.executable, __file__, str(calls), "--worker", kind, *(("--out", out) if out else ())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, start_new_session=True)

    def ask(self, told: dict[str, object], timeout_s: float | None) -> dict[str, object] | None:
        """Its answer; None where it ended, or was ended because it took longer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(told) + "\n")
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            answer = self._process.stdout.readline() if ready else ""
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
        return json.loads(answer) if answer else None

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Campaign:
    """The calls in turn. Context manager: ends its workers."""

    def __init__(self, calls: list[Call], path: Path, out: str | None, timeout_s: float | None) -> None:
        self.calls, self.path, self.out, self.timeout_s = calls, path, out, timeout_s
        self.began = time.monotonic()
        self.failed: list[str] = []
        self._workers: dict[str, Worker] = {}
        self._beside: dict[str, list[dict[str, object]]] = {}
        for kind in LASTING:  # at once, so that their imports run side by side
            if any(kind_of(n) == kind for c in calls for n in c.args.cases if n not in step.BESIDE):
                self._worker(kind)

    def run(self, seconds: float | None) -> None:
        """seconds: no case begins later than that."""
        for number, call in enumerate(self.calls):
            for name in call.args.cases:
                if seconds is not None and time.monotonic() - self.began > seconds:
                    self.failed.append(f"{number}:{name}")
                    print(f"{self._clock()}  {number}  {name}: left out for want of time", flush=True)
                    continue
                self._measure(number, call, name)
            self._end_peers()

    def _measure(self, number: int, call: Call, name: str) -> None:
        began = time.monotonic()
        if name in step.BESIDE:
            told = self._once(call, name)
        elif reason := missing(settings_of(call, name)):
            told = f"not here: {reason}"
        else:
            kind = kind_of(name)
            if kind not in LASTING:
                self._end_peers(but=kind)
                if "ours" in self._workers:  # a peer needs the memory
                    self._workers.pop("ours").close()
            answer = self._worker(kind).ask({"number": number, "run": call.run, "case": name}, self.timeout_s)
            if answer is None:
                self._workers.pop(kind)
            told = "the process ended" if answer is None else str(answer["told"])
            if answer is None or answer["status"]:
                self.failed.append(f"{number}:{name}")
        print(f"{self._clock()}  {number}  {name}: {told}, {time.monotonic() - began:.1f} s in all", flush=True)

    def _once(self, call: Call, name: str) -> str:
        """Lines of a benchmark beside the steps, measured when they are first asked for."""
        if name not in self._beside:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "lines.jsonl"
                script, *words = step.BESIDE[name]
                words += ["--threads", str(len(os.sched_getaffinity(0))), "--steps", "6"] if name == "optimizer" else []
                command = [sys.executable, str(Path(__file__).parent / script), *words, "--out", str(file)]
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
                self._beside[name] = [json.loads(line) for line in file.read_text().splitlines()]
        if self.out:
            with open(self.out, "a") as file:
                file.writelines(json.dumps(line | {"run": call.run}) + "\n" for line in self._beside[name])
        return f"{len(self._beside[name])} lines"

    def _worker(self, kind: str) -> Worker:
        if kind not in self._workers:
            self._workers[kind] = Worker(kind, self.path, self.out)
        return self._workers[kind]

    def _end_peers(self, *, but: str | None = None) -> None:
        for kind in [k for k in self._workers if k not in (*LASTING, but)]:
            self._workers.pop(kind).close()

    def _clock(self) -> str:
        return f"{time.monotonic() - self.began:6.1f} s"

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers.values():
            worker.close()


# what workers do


class Ours:
    """Engines one after another."""

    def __init__(self, calls: list[Call]) -> None:
        from pool import HostPool, measured_once

        self._stack = ExitStack()
        self._stack.enter_context(measured_once())
        self.pool = self._stack.enter_context(HostPool())
        self._num = 0
        every = [
            settings_of(c, n) for c in calls for n in c.args.cases if n not in step.BESIDE and kind_of(n) == "ours"
        ]
        self._nbytes = max((self._host_nbytes(settings) for settings in every), default=0)

    def _host_nbytes(self, settings: Settings) -> int:
        from shapes import shape
        from slideformer.memory import available_nbytes

        a_parameter = HOST_NBYTES[settings.update or "eager"]
        wanted = int(a_parameter * step.num_params(shape(settings.shape, num_layers=settings.num_layers)))
        return min(wanted, available_nbytes())  # some of it may be for the disk

    def measure(self, settings: Settings) -> dict[str, object]:
        from cases.ours import measure

        self.pool.reset(self._nbytes)
        self._num += 1
        measured = measure(settings)
        return measured | ({} if self._num == 1 else {"host_before_gib": None, "host_before_kinds_gib": None})


class Others:
    """The stock model, or a peer. FSDP2's model is built once for cases that differ in their clipping alone."""

    def __init__(self) -> None:
        self._peer: object = None

    def measure(self, settings: Settings) -> dict[str, object]:
        from cases import measure

        if MODULES[settings.case] != "fsdp2":
            return measure(settings)
        from cases.fsdp2 import Fsdp2
        from cases.loop import run

        if self._peer is None:
            self._peer = Fsdp2(settings)
        assert isinstance(self._peer, Fsdp2)
        assert replace(self._peer.settings, max_grad_norm=settings.max_grad_norm) == settings
        self._peer.settings = settings
        return run(self._peer, settings)


def worker(kind: str, calls: list[Call], out: str | None) -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is for people
    import torch

    from cases import NotHere
    from lines import shared, write
    from slideformer.errors import DoesNotFit

    measurer = Ours(calls) if kind == "ours" else Others()
    for told in _told():
        call, name = calls[int(told["number"])], str(told["case"])
        status, text = 0, ""
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)
        settings = settings_of(call, name)
        try:
            measured = measurer.measure(settings)
        except NotHere as error:
            text = f"not here: {error}"
        except (DoesNotFit, MemoryError, torch.OutOfMemoryError) as error:
            status, text = 3, f"does not fit: {str(error).splitlines()[0]}"
        else:
            line = shared("step", str(told["run"]), ["campaign.py", *call.words]) | step.describe(settings, measured)
            with redirect_stdout(io.StringIO()):
                write(line, out)
            text = f"{line['step_s']['median']:.4g} s a step, ready in {line.get('ready_s')} s"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        answers.write(json.dumps({"status": status, "told": text}) + "\n")
    return 0


def _told() -> Iterator[dict[str, object]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", type=Path)
    parser.add_argument("--out", help="file that lines are added to")
    parser.add_argument("--seconds", type=float, help="no case begins later than that")
    parser.add_argument("--case-timeout", type=float, help="seconds after which a case is ended and counts as failed")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    calls = read_calls(args.calls)
    if args.worker:
        return worker(args.worker, calls, args.out)
    with Campaign(calls, args.calls, args.out, args.case_timeout) as campaign:
        campaign.run(args.seconds)
    if campaign.failed:
        print(f"failed: {', '.join(campaign.failed)}", file=sys.stderr)
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
