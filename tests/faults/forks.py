"""Runs of the command line in processes of their own, which may be killed, starved and cut off from their disk.

Importing torch takes seconds, so one process does it and every run is a fork of that one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import yaml

from train.toy import make_model, write_sums

SERVER = """
import contextlib, ctypes, json, os, resource, shutil, signal, sys, traceback
from slideformer.cli import main
from slideformer.train import trainer
trainer.check_parity = lambda *args, **settings: None  # half the time of a run this short

def mount(folder, options):
    'A file system of its own for this process and nobody else; gone when the process is.'
    libc = ctypes.CDLL(None, use_errno=True)
    def call(function, *args):
        if function(*args):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    user, group = os.getuid(), os.getgid()
    call(libc.unshare, 0x00020000 | (0x10000000 if user else 0))
    if user:
        for name, text in (('setgroups', 'deny'), ('uid_map', f'0 {user} 1'), ('gid_map', f'0 {group} 1')):
            with open(f'/proc/self/{name}', 'w') as file:
                file.write(text)
    call(libc.mount, None, b'/', None, 0x44000, None)
    call(libc.mount, b'tmpfs', folder.encode(), b'tmpfs', 0, options.encode())

def obey_permissions():
    'A superuser may read what nobody may; from now on this process may not.'
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for index in range(3):
        data[index] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, data) == 0

def run(wish):
    os.setsid()
    out = os.open(wish['log'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(wish['cwd'])
    os.environ.update(wish['environment'])
    try:
        exec(wish['before'], globals())
    except OSError as error:
        print(f'REFUSED {error}', flush=True)
        os._exit(77)
    sys.argv = ['slideformer', *wish['words']]
    code = 99
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    if wish['keep']:
        shutil.copytree('out', wish['keep'])
    sys.stdout.flush()
    os._exit(code)

for line in sys.stdin:
    wish = json.loads(line)
    if 'wait' in wish:
        print(os.waitstatus_to_exitcode(os.waitpid(wish['wait'], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:
        run(wish)
    print(child, flush=True)
"""

REFUSED = 77


@dataclass
class Child:
    """A run. `wait` for it, whatever happens to it."""

    pid: int
    log: Path
    server: Server
    code: int | None = None

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, text: str, *, timeout_s: float = 60) -> str:
        """Wait until it has told `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.told():
            assert self.alive() and time.monotonic() < deadline, f"never told {text!r}:\n{self.told()}"
            time.sleep(0.005)
        return self.told()

    def alive(self) -> bool:
        """Neither ended nor a zombie that waits to be asked for."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, *, timeout_s: float = 100) -> int:
        """The exit code; minus the signal that killed it."""
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        hung = self.alive()
        if hung:
            self.send(signal.SIGKILL)
        self.code = int(self.server.ask({"wait": self.pid}))
        self.server.children.remove(self)
        assert not hung, f"hung:\n{self.told()}"
        return self.code

    @property
    def error(self) -> str:
        """The last line, which must be a sentence and no traceback."""
        told = self.told()
        assert "Traceback" not in told, told
        last = told.strip().splitlines()[-1]
        assert last.startswith("error: "), told
        return last.removeprefix("error: ")


@dataclass
class Server:
    """The process that forks. preload: a library that is loaded into all of its children."""

    preload: Path | None = None
    children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        if self.preload is not None:
            environment["LD_PRELOAD"] = str(self.preload)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *exc: object) -> None:
        for child in list(self.children):
            if child.alive():
                child.send(signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def ask(self, wish: dict) -> str:
        self.process.stdin.write(json.dumps(wish) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the server is gone"
        return answer.strip()

    def start(
        self,
        cwd: Path,
        *words: object,
        before: str = "",
        keep: str = "",
        log: str = "log.txt",
        **environment: str,
    ) -> Child:
        """`slideformer WORDS` in `cwd`. before: Python that the process runs first, with what the server's text
        has. keep: where it copies "out" at its end, from a file system that nobody else sees."""
        path = cwd / log
        path.unlink(missing_ok=True)
        wish = {"words": [str(word) for word in words], "cwd": str(cwd), "log": str(path), "keep": keep}
        pid = int(self.ask({**wish, "before": before, "environment": environment}))
        self.children.append(Child(pid, path, self))
        return self.children[-1]


def write_config(folder: Path, model: Path, rows: Path, **settings: object) -> Path:
    """train.yaml of a run of a few milliseconds a step; `settings` win."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"model_name_or_path": str(model), "dataset": str(rows), "output_dir": "out", "device": "cpu"}
    defaults |= {"cpu_threads": 1, "max_length": 48, "tile_numel": 1000, "learning_rate": 1e-3}
    defaults |= {"per_device_train_batch_size": 5, "max_steps": 3}
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({**defaults, **settings}))
    return path


def make_toy(folder: Path, **config: object) -> tuple[Path, Path]:
    """(model folder, file of rows) of the smallest run."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16}
    return make_model(folder / "model", **{**sizes, **config}), write_sums(folder / "rows.jsonl", 24)
