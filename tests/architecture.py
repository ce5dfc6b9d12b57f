"""The rules of docs/architecture.md as functions over a source tree. Standard `ast`; nothing is imported.

Each rule takes the modules of a tree and yields one sentence per violation; `violations` runs them all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "slideformer"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
LONG_REASON = re.compile(r"\blong because\b", re.IGNORECASE)

LOWEST = {"errors", "layout", "config", "device", "kernels", "optim", "native", "data"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "layout": set(),
    "config": {"errors"},
    "device": {"errors"},
    "kernels": {"errors", "optim"},  # the definition that the update on a GPU must equal
    "optim": {"errors"},
    "native": {"errors", "optim"},
    "data": {"errors", "config"},
    "schedule": {"layout"},
    "memory": {"errors", "layout", "device", "native", "optim", "schedule"},  # it makes the buffers that plans name
    "model": {"errors", "layout", "kernels"},
    "engine": LOWEST | {"schedule", "memory", "model"},
    "train": LOWEST | {"schedule", "memory", "model", "engine"},
    "cli": LOWEST | {"schedule", "memory", "model", "engine", "train"},
}
"""Which rooms a room may import, itself aside."""

ONLY_IN = {
    "threading": r"device/|memory/disk\.py|train/(console|trackers)\.py",
    "triton": r"kernels/",
    "transformers": r"model/|data/|train/schedule\.py",
    "torch.cuda": r"device/cuda\.py",
    "torch": r"(?!layout\.py|config/|errors\.py|schedule/|cli/__init__\.py)",
}
"""Library: where it may be imported or named (a pattern for the path inside the package)."""

BANNED_FILES = {"util", "utils", "common", "core", "helper", "helpers", "misc"}
BANNED_CLASSES = re.compile(r"(Manager|Handler|Wrapper|Context|Info)$")
READS_THE_WORLD = re.compile(
    r"^(open|print|exec|eval|input)$|^os\.(environ|getenv|system|popen|listdir|stat|makedirs|mkdir|cpu_count)\b"
    r"|\.(read_text|read_bytes|write_text|write_bytes|mkdir|iterdir|glob|rglob|exists|is_file|is_dir|resolve)$"
    r"|^(subprocess|shutil|tempfile|socket|ctypes|mmap|urllib|requests)\.|\b(Thread|ThreadPoolExecutor|Process|CDLL)$"
    r"|^torch\.(?!finfo$|iinfo$|library\.|jit\.|compile$|no_grad$|enable_grad$|inference_mode$|compiler\.)"
)
"""Calls that may not happen at import: files, processes, threads, environment, and torch making or asking anything."""


@dataclass(frozen=True)
class Module:
    name: str
    path: str  # inside the package
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return "cli" if parts[1:] in ([], ["__main__"]) else parts[1]

    @cached_property
    def imports(self) -> list[tuple[str, int]]:
        """(dotted name, line) of everything imported anywhere in the file; `from a import b` gives a.b."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(a.name, node.lineno) for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = self.name.split(".") if self.path.endswith("__init__.py") else self.name.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
                found += [((base + (node.module or "")).strip(".") + "." + a.name, node.lineno) for a in node.names]
        return found


def modules_of(root: Path) -> dict[str, Module]:
    """root: the folder of the package."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        parts = [PACKAGE, *path.with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path.as_posix(), file.read_text())
    return found


def violations(root: Path) -> list[str]:
    modules = modules_of(root)
    per_module = (floors, libraries, prints, at_import, statements, names, sizes)
    found = [text for rule in per_module for module in modules.values() for text in rule(module)]
    return sorted([*found, *unreachable(modules)])


def floors(module: Module) -> Iterator[str]:
    for name, line in module.imports:
        room = name.split(".")[1] if name.startswith(PACKAGE + ".") else None
        if room in MAY_IMPORT and room != module.room and room not in MAY_IMPORT.get(module.room, set()):
            yield f"{module.path}:{line} imports {room}, which {module.room} may not"


def libraries(module: Module) -> Iterator[str]:
    used = list(module.imports)
    used += [(dotted(n), n.lineno) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute)]
    for library, places in ONLY_IN.items():
        lines = [line for name, line in used if name == library or name.startswith(library + ".")]
        if lines and not re.match(places, module.path):
            yield f"{module.path}:{min(lines)} uses {library}"


def prints(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print" and module.room != "cli":
            yield f"{module.path}:{node.lineno} prints"


def at_import(module: Module) -> Iterator[str]:
    for node in import_time(module.tree):
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        named = dotted(node) if isinstance(node, ast.Attribute) and dotted(node) == "os.environ" else ""
        if READS_THE_WORLD.search(called) or named:
            yield f"{module.path}:{node.lineno} calls {called or named} at import"


def import_time(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: all but the bodies of functions, and of `if __name__ == "__main__"`."""
    yield node
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and name in ("body", "returns"):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from import_time(child)


def statements(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno} has a global statement"
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield f"{module.path}:{node.lineno} defines __del__"


def names(module: Module) -> Iterator[str]:
    if banned := BANNED_FILES & set(Path(module.path).with_suffix("").parts):
        yield f"{module.path} is called {banned.pop()}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and BANNED_CLASSES.search(node.name):
            yield f"{module.path}:{node.lineno} names a class {node.name}"


def sizes(module: Module) -> Iterator[str]:
    num_lines = len(module.source.splitlines())
    if num_lines > MAX_FILE_LINES and not LONG_REASON.search(ast.get_docstring(module.tree) or ""):
        yield f"{module.path} has {num_lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES and not LONG_REASON.search(ast.get_docstring(node) or ""):
                yield f"{module.path}:{node.lineno} {node.name} has {num_lines} lines"


def unreachable(modules: dict[str, Module]) -> Iterator[str]:
    """Modules that no command leads to. Importing a.b runs a as well."""
    seen: set[str] = set()
    todo = [f"{PACKAGE}.cli", f"{PACKAGE}.__main__"]
    while todo:
        name = todo.pop()
        if name in modules and name not in seen:
            seen.add(name)
            targets = [imported for imported, _ in modules[name].imports] + [name]
            todo += [".".join(t.split(".")[:i]) for t in targets for i in range(1, t.count(".") + 2)]
    for name in modules.keys() - seen:
        yield f"{modules[name].path} is not reachable from cli"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; a leading '.' where the base is an expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""
