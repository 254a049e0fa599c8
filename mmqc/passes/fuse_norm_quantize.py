"""A norm, the sum in front of it and the quantization behind it become one operation.

    quantize(n(x) ∘ g + β, s, …)                 ->  q, _ = norm_quantize(x, none, g, β, …, s, …)    n(x) = x / rms(x), LayerNorm
    h = x + r, quantize(n(h) ∘ g, s, …)          ->  q, h = norm_quantize(x, r, g, …, s, …)
    quantize_per_token(n(x) ∘ g + β, …)          ->  norm_quantize_per_token(x, none, g, β, …)       n(x) = x / rms(x)
    h = x + r, quantize_per_token(n(h) ∘ g, …)   ->  q, s, o, h = norm_quantize_per_token(x, r, g, …)

Shapes:  those of ops/norm_quantize.py and ops/norm_quantize_per_token.py
Why:     the norm's result, which nothing else reads, is neither written nor read: 3 or 7 bytes a channel and token in 16 bits
         instead of 7 or 11; and one pass over a row where Inductor's reductions of more than 1,024 channels take two.
Needs:   nothing
Gives:   nothing
Exact:   yes: the op rounds where the norm does
Refuses: a norm that something else reads; one with a reshape behind it, or that rounds elsewhere; a LayerNorm in front of a
         quantization by token.  A sum that is read in front
         of the quantization, by something besides the norm, stays a sum; so does one of another layer than its norm's on a
         CPU, where its fusion saves nothing and layers that are alike, the last with them, are compiled once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.semantic import layer_norm, rms_norm
from mmqc.graph.sizes import sizes
from mmqc.passes.fuse_hadamard_quantize import form as _form
from mmqc.passes.fuse_hadamard_quantize import requires_grad
from mmqc.passes.raise_ops import CALLED, called_norm, mean_square, uncast
from mmqc.passes.share_quantize import PER_TOKEN

SAME = ("contiguous", "to", "float", "half", "bfloat16", "type", "type_as")
STATIC = "quantize"
RESHAPES = ("view", "reshape", "flatten", "unflatten")


class Core(NamedTuple):
    """What is normalised; whether it gives x's dtype by itself; gain and bias of a LayerNorm that has them inside."""

    x: Any
    eps: float
    center: bool = False
    rounds: bool = False
    gain: fx.Node | None = None
    bias: fx.Node | None = None


@dataclass(frozen=True)
class Site:
    """A quantization and the norm that it reads.

    ``core`` is x / rms(x) or a LayerNorm, ``inside`` what lies between x and the quantization, ``total`` the sum that is taken
    over.
    """

    quantize: fx.Node
    core: fx.Node
    dtype: torch.dtype
    gain: fx.Node | None
    bias: fx.Node | None
    round_first: bool
    inside: frozenset[fx.Node]
    total: fx.Node | None = None

    @property
    def x(self) -> fx.Node:
        """What is normalised, as it is now: an earlier site may have replaced it."""
        return _base(_core(self.core).x, self.dtype)  # type: ignore[union-attr]

    def __str__(self) -> str:
        return f"{'' if self.total is None else f'{self.total.name}, '}{self.core.name}, {self.quantize.name}"


@dataclass(frozen=True)
class FuseNormQuantize(Pass):
    name = "fuse_norm_quantize"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every quantization of a norm."""
        place = {node: i for i, node in enumerate(prog.graph.nodes)}
        taken: set[fx.Node] = set()
        for node in prog.nodes(STATIC, PER_TOKEN):
            found = norm_of(node)
            if isinstance(found, str):
                yield Miss(node.name, found)
            elif found is not None:
                total = sum_in_front(found, place)
                if total is not None and total not in taken:
                    taken.add(total)
                    found = dataclasses.replace(found, total=total)
                yield found

    def rewrite(self, prog: Program, site: Site) -> None:
        """One call, and x + r as its last result."""
        node, total, core = site.quantize, site.total, _core(site.core)
        assert core is not None
        x, r = (site.x, None) if total is None else total.args
        static = kind(node) == STATIC
        op = torch.ops.mmqc.norm_quantize if static else torch.ops.mmqc.norm_quantize_per_token
        how = (core.center, site.round_first) if static else (site.round_first,)
        with prog.graph.inserting_before(node):
            fused = prog.graph.call_function(
                op.default, (x, r, site.gain, site.bias, core.eps, *how, *node.args[1:]), dict(node.kwargs)
            )
        copy_meta(fused, node, self.name, 0)
        example, last = node.meta.get("example_value"), None if total is None else total.meta.get("example_value")
        if example is not None:
            fused.meta["example_value"] = (*((example,) if static else example), last)
        q = self.part(prog, fused, node, 0, example) if static else fused
        node.replace_all_uses_with(q)
        if total is not None:
            h = self.part(prog, fused, total, 1 if static else 3, last)
            total.replace_all_uses_with(h, lambda user: user not in site.inside)

    def part(self, prog: Program, fused: fx.Node, old: fx.Node, i: int, example: Any) -> fx.Node:
        """The result that stands for ``old``."""
        with prog.graph.inserting_after(fused):
            new = prog.graph.call_function(operator.getitem, (fused, i))
        copy_meta(new, old, self.name, 0)
        new.meta["example_value"] = example
        return new


def sum_in_front(site: Site, place: dict[fx.Node, int]) -> fx.Node | None:
    """X + r, where the norm and what comes after the quantization are all that read it."""
    x = site.x
    if kind(x) != "add" or mutates(x) or x.kwargs or len(x.args) != 2:
        return None
    alike = len({_form(n) for n in (x, *x.args)}) == 1 and bool(_form(x))
    alone = all(u in site.inside or u is site.quantize for node in site.inside for u in node.users)
    later = all(u in site.inside or place[u] > place[site.quantize] for u in x.users)
    return x if alike and alone and later and (_on_cuda(x) or _in_one_layer(x, site.core)) else None


def _on_cuda(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.is_cuda


def _in_one_layer(total: fx.Node, norm: fx.Node) -> bool:
    """Whether the module that adds is one of those around the norm; where nothing says, it may be."""
    outer, inner = ([path for path, _ in (n.meta.get("nn_module_stack") or {}).values()] for n in (total, norm))
    return not outer or not inner or outer[-1] in inner


def norm_of(quantize: fx.Node) -> Site | str | None:
    """The norm that a quantization reads; why the two cannot be fused; None if it reads none."""
    y: Any = quantize.args[0]
    dtype = _dtype(y)
    if dtype is None:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    node, casts = _peeled(y)
    if kind(node) in RESHAPES and isinstance(node.args[0], fx.Node):
        return "a reshape stands between it and its norm" if _core(_peeled(_inner(node.args[0]))[0]) else None
    vectors: dict[str, fx.Node | None] = {}
    narrow, odd = set(), any(_dtype(c) not in (dtype, wide) for c in casts)
    for word in ("add", "mul"):
        rest, vector = _step(node, word, sizes(y)) if _core(node) is None else (None, None)
        if rest is None or vector is None:
            continue
        inner, casts = _peeled(rest)
        narrow.add(_dtype(node) != wide)
        through = (wide,) if _dtype(node) == wide else (dtype, wide)
        odd |= _dtype(rest) != _dtype(node) or any(_dtype(c) not in through for c in casts)
        vectors[word], node = vector, inner
    found = _core(node)
    if found is None:
        return None
    x = _base(found.x, dtype)
    if found.gain is not None or found.bias is not None:
        odd, vectors = odd or bool(vectors), {"mul": found.gain, "add": found.bias}
    elif found.rounds and vectors:
        odd |= wide != dtype and narrow != {True}
    if _form(x) != _form(y) or _dtype(node) != (dtype if found.rounds else wide) or odd or len(narrow) > 1:
        return "its norm rounds in other places, or gives another dtype or shape than it takes"
    inside = _between(x, y, [v for v in vectors.values() if v is not None])
    if reason := _why_not(quantize, y, found, inside):
        return reason
    gain, bias = (None if v is None else _widest(v, dtype) for v in (vectors.get("mul"), vectors.get("add")))
    return Site(quantize, node, dtype, gain, bias, True in narrow, inside)


def _why_not(quantize: fx.Node, y: fx.Node, core: Core, inside: frozenset[fx.Node]) -> str | None:
    """What keeps the two apart though the norm is one that the op has."""
    if core.center and kind(quantize) == PER_TOKEN:
        return "a LayerNorm, which the op by token does not have"
    if others := [u for u in y.users if u is not quantize and u not in inside]:
        return f"{1 + len(others)} operations read {y.name}"
    if torch.is_grad_enabled() and requires_grad(y):
        return "the fused form has no gradient: run under torch.no_grad()"
    return None


def _core(node: Any) -> Core | None:
    """Of x rsqrt(mean(x²) + eps), of a norm of semantic.py, or of torch's own of the last dimension."""
    if not isinstance(node, fx.Node):
        return None
    if node.target in (layer_norm, rms_norm):
        return Core(*node.args, center=node.target is layer_norm, rounds=True)  # type: ignore[misc]
    if kind(node) in CALLED:
        found = called_norm(node)
        center = kind(node) == "layer_norm"
        return Core(found.x, found.eps, center, True, found.gain, found.bias) if found.axes == 1 else None
    if kind(node) != "mul" or len(node.args) != 2:
        return None
    for root, x in (node.args, node.args[::-1]):
        if isinstance(root, fx.Node) and kind(root) == "rsqrt" and (square := mean_square(root.args[0])) is not None:
            return Core(*square) if uncast(x) is uncast(square[0]) else None
    return None


def _step(node: fx.Node, word: str, size: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """(The other operand, the vector of the channels) of a product or a sum of the two."""
    if kind(node) != word or node.kwargs or len(node.args) != 2 or mutates(node):
        return None, None
    for vector, rest in (node.args, node.args[::-1]):
        if isinstance(vector, fx.Node) and isinstance(rest, fx.Node) and sizes(vector) == (size or (None,))[-1:]:
            return rest, vector
    return None, None


def _inner(node: fx.Node) -> fx.Node:
    """What lies below a gain and a bias."""
    for word in ("add", "mul"):
        node = _peeled(node)[0]
        rest = _step(node, word, sizes(node))[0] if _core(node) is None else None
        node = node if rest is None else rest
    return node


def _peeled(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What casts and copies are of, and these."""
    through = []
    while kind(node) in SAME and isinstance(node.args[0], fx.Node):
        through.append(node)
        node = node.args[0]
    return node, through


def _base(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """X where node is a cast of it from ``dtype``."""
    while kind(node) in SAME and isinstance(node.args[0], fx.Node) and _dtype(node.args[0]) == dtype:
        node = node.args[0]
    return node


def _widest(vector: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A vector without casts that lose nothing: the kernel has it in float32 anyway."""
    while kind(vector) in SAME and isinstance(vector.args[0], fx.Node):
        below = _dtype(vector.args[0])
        if below not in (dtype, torch.float32) or torch.promote_types(below, _dtype(vector)) != _dtype(vector):  # type: ignore[arg-type]
            break
        vector = vector.args[0]
    return vector


def _between(x: fx.Node, y: fx.Node, stops: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """What y is computed by from x, y included."""
    inside: set[fx.Node] = set()
    left, ends = [y], {x, *stops}
    while left:
        node = left.pop()
        if node not in ends and node not in inside:
            inside.add(node)
            left += node.all_input_nodes
    return frozenset(inside)


def _dtype(node: Any) -> torch.dtype | None:
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return example.dtype if isinstance(example, Tensor) else None
