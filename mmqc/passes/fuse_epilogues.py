"""What stands behind a quantized linear goes into its epilogue: activation, gate, the next quantization, a term of low rank.

    quantize(f(z), s)        ->  scaled_matmul_epilogue(z's operands, f, s)              f: relu, silu, gelu in three forms
    quantize(f(g) ∘ u, s)    ->  scaled_matmul_epilogue(those of g and u, f, s)          g and u of one input
    hadamard(f(z))           ->  hadamard(scaled_matmul_epilogue(z's operands, f))       the same with f(g) ∘ u
    z + x_S W_Sᵀ             ->  scaled_matmul_epilogue(z's operands, x_S, W_S)          few channels (magnitude suppression)

Why:     z and h = f(z) are not written and read again: of 5 bytes an entry that move behind a linear 1 is left, of 9 behind gate
         and up (docs/explanation/epilogues.md counts them, and says where nothing is gained).
Needs:   nothing
Gives:   nothing
Exact:   yes as an operation; a kernel computes f, and the sum with a term of low rank, in float32 and rounds once
Refuses: a linear whose result something else reads; an activation that generated code reads (a norm, a sum: it is computed there
         for nothing); scales of groups, whose kernels have no epilogue; a gate in front of a transform where the rows are known
         to be few, which the transform takes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.ops.pack import FLOAT8

MOST_RANK = 16  # of a term that is added entry by entry, not by tensor cores
GATE_IN_TRANSFORM_ROWS = 64  # up to which gate and up are one launch, and a transform reads its row as often as it has slices
SIGMOIDS = {1: "silu", 1.702: "quick_gelu"}  # x sigmoid(factor x)
OWN = (1, 3, 4)  # operands of scaled_matmul that each linear has for itself: weight, its scale, bias
SHARED = (0, 2, 5, 6, 7)
GROUP_SIZE = 9


@dataclass(frozen=True)
class Site:
    """Gate (or the only linear), up, the activation, what they give, its quantization if that is fused too; or a term."""

    gate: fx.Node
    up: fx.Node | None
    activation: str
    result: fx.Node
    quantize: fx.Node | None
    low: fx.Node | None = None

    def __str__(self) -> str:
        if self.low is not None:
            return f"{self.gate.name} + {self.low.name}"
        gated = "" if self.up is None else f" * {self.up.name}"
        codes = "" if self.quantize is None else f", {self.quantize.name}"
        return f"{self.activation}({self.gate.name}){gated}{codes}"


@dataclass(frozen=True)
class FuseEpilogues(Pass):
    name = "fuse_epilogues"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every activation of a quantized linear, and every term of low rank."""
        for node in prog.nodes("add"):
            found = low_rank(node)
            if found is not None:
                reason = why_not(found[0], {node})
                yield Miss(node.name, reason) if reason else Site(found[0], None, "none", node, None, found[1])
        for node in prog.nodes("relu", "silu", "gelu", "mul"):
            found = activation_of(node)
            if found is None or kind(found[1]) != "scaled_matmul":
                continue
            activation, z, inside = found
            reason = why_not(z, {node, *inside})
            if reason:
                yield Miss(node.name, reason)
                continue
            result, up = gated(node, z)
            reader = next(iter(result.users)) if len(result.users) == 1 else None
            word = "" if reader is None else kind(reader)
            if word == "quantize" and reader is not None and FLOAT8 not in reader.args:
                yield Site(z, up, activation, result, reader)
            elif word != "hadamard":
                yield Miss(node.name, f"what reads {result.name} is generated code, which takes the activation in")
            elif up is not None and few_rows(z):
                yield Miss(node.name, f"at most {GATE_IN_TRANSFORM_ROWS} rows: the transform takes the gate in")
            else:
                yield Site(z, up, activation, result, None)

    def rewrite(self, prog: Program, site: Site) -> None:
        """One call in place of the last operation."""
        x_q, _, x_scale, _, _, visual, bits, dtype = site.gate.args[:8]
        linears = [site.gate] if site.up is None else [site.gate, site.up]
        weights, scales, biases = ([linear.args[i] for linear in linears] for i in OWN)
        last = site.quantize or site.result
        codes = () if site.quantize is None else site.quantize.args[1:4]
        codes = codes if site.low is None else (None, None, 8, *site.low.args[:2])
        with prog.graph.inserting_before(last):
            fused = prog.graph.call_function(
                torch.ops.mmqc.scaled_matmul_epilogue.default,
                (x_q, weights, x_scale, scales, biases, visual, bits, dtype, site.activation, *codes),
            )
        copy_meta(fused, last, self.name, 0)
        if "example_value" in last.meta:
            fused.meta["example_value"] = last.meta["example_value"]
        last.replace_all_uses_with(fused)


def activation_of(node: fx.Node) -> tuple[str, fx.Node, tuple[fx.Node, ...]] | None:
    """The activation that ends here: its name, its input, and the operations that it is spelled with besides the last."""
    word = kind(node)
    if word == "mul":
        return _by_sigmoid(node)
    z, given = node.args[0] if node.args else None, dict(node.kwargs)
    if not isinstance(z, fx.Node) or len(node.args) > 1 or given.pop("inplace", False):
        return None
    form = given.pop("approximate", "none")
    if given or form not in ("none", "tanh"):
        return None
    return ("gelu_tanh" if form == "tanh" else word), z, ()


def _by_sigmoid(node: fx.Node) -> tuple[str, fx.Node, tuple[fx.Node, ...]] | None:
    """X sigmoid(x), or x sigmoid(1.702 x)."""
    for i, factor in enumerate(node.args[:2]):
        z = node.args[1 - i] if len(node.args) == 2 else None
        if not isinstance(factor, fx.Node) or not isinstance(z, fx.Node):
            continue
        if kind(factor) != "sigmoid" or len(factor.users) > 1 or not isinstance(factor.args[0], fx.Node):
            continue
        inner = factor.args[0]
        if inner is z:
            return SIGMOIDS[1], z, (factor,)
        if kind(inner) == "mul" and len(inner.args) == 2 and z in inner.args and len(inner.users) == 1:
            times = inner.args[1 - inner.args.index(z)]
            if isinstance(times, float) and times in SIGMOIDS:
                return SIGMOIDS[times], z, (factor, inner)
    return None


def low_rank(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A quantized linear and the linear of few inputs that is added to it here."""
    for i, z in enumerate(node.args if len(node.args) == 2 and not node.kwargs else ()):
        term = node.args[1 - i]
        if isinstance(z, fx.Node) and kind(z) == "scaled_matmul" and isinstance(term, fx.Node) and _is_few(term, z):
            return z, term
    return None


def _is_few(term: fx.Node, z: fx.Node) -> bool:
    """Whether it is a linear without bias, of few inputs, that nothing else reads, in the dtype of z."""
    more = (*term.args[2:], *term.kwargs.values())
    if kind(term) != "linear" or len(term.users) > 1 or any(a is not None for a in more):
        return False
    values = [n.meta.get("example_value") for n in (*term.args[:2], z) if isinstance(n, fx.Node)]
    tensors = [v for v in values if isinstance(v, Tensor)]
    return len(tensors) == 3 and len({v.dtype for v in tensors}) == 1 and tensors[1].shape[-1] <= MOST_RANK


def why_not(z: fx.Node, readers: set[fx.Node]) -> str:
    """The reason to leave a linear as it is, or nothing."""
    if len(z.args) > GROUP_SIZE and z.args[GROUP_SIZE]:
        return "its weight has scales of groups, whose kernels have no epilogue"
    if not set(z.users) <= readers:
        return f"something else reads {z.name}"
    codes = z.args[0].meta.get("example_value") if isinstance(z.args[0], fx.Node) else None
    if isinstance(codes, Tensor) and codes.dtype == FLOAT8:
        return "its codes are float8, whose kernels have no epilogue"
    return ""


def gated(h: fx.Node, gate: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(h * up, up) where a linear of the gate's input is all that h is multiplied by, else (h, None)."""
    if len(h.users) == 1:
        product = next(iter(h.users))
        if kind(product) == "mul" and len(product.args) == 2 and h in product.args:
            up = product.args[1 - product.args.index(h)]
            if isinstance(up, fx.Node) and _pair(gate, up) and len(up.users) == 1:
                return product, up
    return h, None


def _pair(gate: fx.Node, up: fx.Node) -> bool:
    """Whether two linears have one input, and results of one form."""
    if kind(up) != "scaled_matmul" or why_not(up, set(up.users)) or len(gate.args) < 8 or len(up.args) < 8:
        return False
    shared = all(gate.args[i] == up.args[i] for i in SHARED)
    return shared and (gate.args[4] is None) == (up.args[4] is None) and "" != _form(gate) == _form(up)


def _form(node: fx.Node) -> str:
    """Shape and dtype in words: to compare symbolic sizes would guard on them."""
    example = node.meta.get("example_value")
    return f"{tuple(example.shape)} {example.dtype}" if isinstance(example, Tensor) else ""


def few_rows(z: fx.Node) -> bool:
    """Whether the number of rows is known and small."""
    example = z.meta.get("example_value")
    rows = example.shape[:-1] if isinstance(example, Tensor) else ()
    return all(isinstance(size, int) for size in rows) and math.prod(rows) <= GATE_IN_TRANSFORM_ROWS and bool(rows)
