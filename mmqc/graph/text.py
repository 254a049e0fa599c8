"""A program as text: one line per node, the same for both captures, with no path or line number in it."""

from __future__ import annotations

import difflib
from typing import Any

from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Program


def _show(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_show, value))}]"
    return str(value)


def program_text(prog: Program) -> str:
    """Readable lines ``name = kind(operands)``; weights appear by name where they are used."""
    lines = []
    for node in prog.graph.nodes:
        if node.op == "get_attr":
            continue
        operands = ", ".join([*map(_show, node.args), *(f"{k}={_show(v)}" for k, v in node.kwargs.items())])
        made = f"  # {node.meta['mmqc'][0]}" if "mmqc" in node.meta else ""
        lines.append(f"{node.name} = {kind(node)}({operands}){made}")
    return "\n".join(lines)


def text_diff(before: str, after: str, context: int = 0) -> str:
    """Changed lines only, unified."""
    return "\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=context))[2:])
