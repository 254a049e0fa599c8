"""Recognise norms, however they are spelled, and give them unit scale with gain and bias as nodes of their own.

    x * rsqrt(mean(x^2) + eps)            ->  rms_norm(x)
    layer_norm(x, n, w, b, eps)           ->  layer_norm(x) * w + b
    rms_norm(x, n, w, eps)                ->  rms_norm(x) * w
    x / sqrt(mean(x^2) + eps)             ->  rms_norm(x)
    either of these with x - mean(x)      ->  layer_norm(x)

Shapes:  x [*, K]   w, b [K]
Why:     the exact rewrites must see a norm as one operation, and its gain apart from it.
Needs:   nothing
Gives:   ops.raised
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a layer_norm over more than the last axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.semantic import layer_norm, rms_norm

_CASTS = ("to", "float", "double", "type", "type_as", "half", "bfloat16")


@dataclass(frozen=True)
class Site:
    """``node`` becomes ``norm(x) * gain + bias``."""

    node: fx.Node
    x: fx.Node
    norm: Any
    eps: float
    gain: fx.Node | None = None
    bias: fx.Node | None = None

    def __str__(self) -> str:
        return f"{self.norm.__name__} at {self.node.name}"


def _as_it_is_now(site: Site) -> fx.Node:
    """The norm's operand: an earlier site may have replaced the one that was matched."""
    around = [n for n in site.node.all_input_nodes if n.op != "get_attr" and kind(n) not in ("rsqrt", "sqrt", "pow")]
    if site.x in site.node.all_input_nodes:
        return site.x
    return _centred(around[0]) or around[0]


class CalledNorm(NamedTuple):
    """The operands of ``F.layer_norm`` or ``F.rms_norm``, and over how many axes it is."""

    x: Any
    axes: int
    eps: float
    gain: fx.Node | None
    bias: fx.Node | None


CALLED = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}


def called_norm(node: fx.Node) -> CalledNorm:
    """Of a call, with torch's defaults: an RMSNorm's epsilon is that of the type that it computes in."""
    word = kind(node)
    given: dict[str, Any] = dict(zip(CALLED[word], node.args, strict=False)) | dict(node.kwargs)
    eps = given.get("eps")
    if eps is None and word == "layer_norm":
        eps = 1e-5
    elif eps is None:
        dtype = node.meta.get("dtype") or getattr(node.meta.get("example_value"), "dtype", torch.float32)
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    elif isinstance(eps, fx.Node):  # Dynamo made it an input after it had seen two values: this graph is for one
        eps = eps.meta["example_value"]
    return CalledNorm(given["input"], len(given["normalized_shape"]), float(eps), given.get("weight"), given.get("bias"))


def uncast(node: Any) -> Any:
    """What a cast is of, or the node itself."""
    while isinstance(node, fx.Node) and kind(node) in _CASTS:
        node = node.args[0]
    return node


def mean_square(node: Any) -> tuple[fx.Node, float] | None:
    """(x, eps) where node is mean(x^2, -1, keepdim) + eps."""
    if not (isinstance(node, fx.Node) and kind(node) == "add"):
        return None
    args: Any = node.args
    mean, eps = args
    if not isinstance(mean, fx.Node):
        mean, eps = eps, mean
    if not (isinstance(mean, fx.Node) and kind(mean) == "mean" and isinstance(eps, float)):
        return None
    given: dict[str, Any] = dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)) | dict(mean.kwargs)
    square, dims, keepdim = given["input"], given.get("dim"), given.get("keepdim", False)
    if dims not in (-1, [-1], (-1,)) or not keepdim or not isinstance(square, fx.Node):
        return None
    if (kind(square) == "pow" and square.args[1] in (2, 2.0)) or kind(square) == "square":
        return square.args[0], eps  # type: ignore[return-value]
    return None


def _centred(node: Any) -> fx.Node | None:
    """X where node is x - mean(x, -1, keepdim)."""
    node = uncast(node)
    if not (isinstance(node, fx.Node) and kind(node) == "sub"):
        return None
    x, mean = node.args[:2]
    if not (isinstance(x, fx.Node) and isinstance(mean, fx.Node) and kind(mean) == "mean"):
        return None
    given = dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)) | dict(mean.kwargs)
    whole = given.get("dim") in (-1, [-1], (-1,)) and given.get("keepdim")
    return x if whole and given["input"] is x and node.kwargs.get("alpha", 1) == 1 else None


@dataclass(frozen=True)
class RaiseOps(Pass):
    name = "raise_ops"
    gives = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Spelled-out RMSNorms by their rsqrt, library norms by their call."""
        for node in prog.graph.nodes:
            word = kind(node)
            if word in ("rsqrt", "sqrt") or (word == "pow" and node.args[1] in (-0.5, 0.5)):
                yield from self.spelled(node, "mul" if word == "rsqrt" or node.args[1:] == (-0.5,) else "div")
            elif word in ("layer_norm", "rms_norm") and node.target not in (layer_norm, rms_norm):
                yield self.called(node, word)

    def spelled(self, root: fx.Node, how: str) -> Iterator[Site]:
        """Multiplications of x by 1 / rms(x), or divisions by rms(x)."""
        found = mean_square(root.args[0])
        for user in root.users if found else ():
            if kind(user) != how or (how == "div" and user.args[1] is not root):
                continue
            x = user.args[0] if user.args[1] is root else user.args[1]
            square, eps = found  # type: ignore[misc]
            centred = _centred(x)
            if centred is not None and centred is _centred(square):
                yield Site(user, centred, layer_norm, eps)
            elif uncast(x) is uncast(square):
                yield Site(user, x, rms_norm, eps)  # type: ignore[arg-type]

    def called(self, node: fx.Node, word: str) -> Site | Miss:
        """``F.layer_norm`` and ``F.rms_norm``."""
        found = called_norm(node)
        if found.axes != 1:
            return Miss(node.name, f"{word} over {found.axes} axes")
        norm = layer_norm if word == "layer_norm" else rms_norm
        return Site(node, found.x, norm, found.eps, found.gain, found.bias)

    def rewrite(self, prog: Program, site: Site) -> None:
        """Replace the node by unit norm, gain and bias."""
        x = _as_it_is_now(site)
        with prog.graph.inserting_before(site.node):
            new = prog.graph.call_function(site.norm, (x, site.eps))
            copy_meta(new, site.node, self.name, 0)
            prog.sketch_as(new, x)
            if site.gain is not None and site.gain.op == "get_attr":
                new.meta["gain"] = str(site.gain.target)
            for word, operand in (("mul", site.gain), ("add", site.bias)):
                if operand is not None:
                    new = prog.graph.call_method(word, (new, operand))
                    copy_meta(new, site.node, self.name, 0)
                    prog.sketch_as(new, site.node)
        for key in ("shape", "dtype", "example_value"):
            if key in site.node.meta:
                new.meta[key] = site.node.meta[key]
        site.node.replace_all_uses_with(new)
