"""The project's source as a test reads it: files, imports, functions, strings."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mmqc"
TESTS = ROOT / "tests"


class Import(NamedTuple):
    """One imported module path, and the line that names it."""

    module: str
    line: int


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below `tree`, without the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_time_nodes(child)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain that starts at a name, else the empty string."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def imports(path: Path, nodes: Callable[[ast.AST], Iterator[ast.AST]] = run_time_nodes) -> tuple[Import, ...]:
    """What the file imports, anywhere in it: statements, `import_module("…")`, and `torch._x` reached by attribute."""
    return tuple(_imports(path, nodes))


def _imports(path: Path, nodes: Callable[[ast.AST], Iterator[ast.AST]]) -> Iterator[Import]:
    package = module_name(path).split(".")
    here = package if path.name == "__init__.py" else package[:-1]
    for node in nodes(parse(path)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
                yield Import(str(node.args[0].value), node.lineno)
        elif isinstance(node, ast.Attribute) and dotted(node).startswith(("torch._inductor", "torch._dynamo")):
            yield Import(dotted(node), node.lineno)


def is_below(module: str, root: str) -> bool:
    return module == root or module.startswith(root + ".")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String constants that are not docstrings or other bare expression statements, nor parts of error messages."""
    bare = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    joined = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | joined:
            yield node.lineno, node.value
