"""Gluon's names change from one version of Triton to the next: those that our kernels use are in the installed one."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

pytest.importorskip("triton")

import mmqc.kernels

ROOT = Path(mmqc.kernels.__file__).parent
GLUON = "triton.experimental.gluon"
FILES = [path for path in sorted(ROOT.rglob("*.py")) if f"from {GLUON}" in path.read_text(encoding="utf-8")]


def imported(tree: ast.Module) -> dict[str, object]:
    """What a file's names of Gluon's stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(GLUON):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                found[name.asname or name.name] = getattr(module, name.name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names__are_in_the_installed_triton(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported(tree)
    assert names
    either = [n for n in ast.walk(tree) if isinstance(n, ast.IfExp) and ast.unparse(n.test).startswith("hasattr(")]
    for node in either:  # which of two names there is
        eval(ast.unparse(node), dict(names))
    excused = {id(part) for node in either for part in ast.walk(node)}
    read = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and id(n) not in excused]
    used = {(n.value.id, n.attr) for n in read if isinstance(n.value, ast.Name) and n.value.id in names}
    assert not [f"{name}.{attr}" for name, attr in sorted(used) if not hasattr(names[name], attr)]
    assert not [f"{name}.{attr}" for name, attr in sorted(used) if is_gone(getattr(names[name], attr))]


def is_gone(found: object) -> bool:
    """Whether what has the name says that there is something else now: Triton 3.9's, when a kernel that calls it is compiled."""
    try:
        return "has been removed" in inspect.getsource(inspect.unwrap(found))  # type: ignore[arg-type]
    except TypeError:  # no function
        return False


def test_names__which_of_two() -> None:
    from mmqc.kernels.shared import gluon_names

    assert not [name for name in ("async_load", "async_store", "reinterpret") if is_gone(getattr(gluon_names, name))]
