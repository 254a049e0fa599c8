"""Gluon's names change from one version of Triton to the next: those that our kernels use are in the installed one."""

from __future__ import annotations

import ast
import importlib
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
    asked = {ast.unparse(n.test.args[0]) for n in ast.walk(tree) if isinstance(n, ast.IfExp) and isinstance(n.test, ast.Call)}
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }
    either = {"barrier", "thread_barrier"} if asked else set()  # the file asks which of the two there is
    missing = [f"{name}.{attr}" for name, attr in sorted(used) if attr not in either and not hasattr(names[name], attr)]
    assert not missing
