"""Which Hadamard transforms of a graph have the matrices of ``hadamard_factors``, the only ones that the kernel knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from mmqc.kernels.hadamard.hadamard_plan import all_known

# Of the factors among the operands.
PLACE = {"hadamard": 1, "hadamard_quantize": 2, "hadamard_quantize_kept": 2, "hadamard_quantize_per_token": 2}


def known_transforms(gm: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """The widths whose every transform in ``gm`` is known; ``inputs``, if any, are the values of its placeholders."""
    given = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=bool(inputs)))
    found: dict[int, bool] = {}
    for node in gm.graph.nodes:
        name = str(node.target).removeprefix("mmqc.").removesuffix(".default")
        if node.op != "call_function" or name not in PLACE:
            continue
        factors = [_value(gm, given, n) for n in node.args[PLACE[name]]]
        width = _width(factors)
        found[width] = found.get(width, True) and width > 0 and all_known(factors, width)  # type: ignore[arg-type]
    return frozenset(width for width, known in found.items() if known)


def _value(gm: fx.GraphModule, given: dict[fx.Node, Any], node: fx.Node) -> Tensor | None:
    value = given.get(node)
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(gm.get_submodule(owner), name, None)
    return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None


def _width(factors: Sequence[Tensor | None]) -> int:
    """The product of their sizes; 0 if one is not to be had."""
    width = 1
    for factor in factors:
        width *= 0 if factor is None else factor.shape[0]
    return width
