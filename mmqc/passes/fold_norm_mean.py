"""Turn LayerNorms into RMSNorms by taking the mean out of everything that writes their stream.

    LN(x) = RMSNorm(x - mean(x)),   mean-free x  <=>  every writer v of the stream becomes v - mean(v)
    W <- W - (1/D) 1 1ᵀ W,   b <- b - mean(b)          (MQuant, arXiv:2502.00425, equation 10)

Shapes:  stream [*, D]   W [D, K]   b [D]; also embeddings, positions, class tokens [.., D] and patch convolutions.
Why:     RMSNorm commutes with every rotation, LayerNorm only with those that keep the mean.
Needs:   ops.raised
Gives:   nothing: what was refused stays a LayerNorm
Exact:   yes, up to reassociation (fp64 1e-12), where nothing but mean-free norms reads the stream
Refuses: a stream that something else reads (a linear, an output, an RMSNorm), or that an operation or graph input writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from ..graph.linear import bias_of
from ..graph.program import Miss, Program, copy_meta
from ..graph.semantic import rms_norm
from ..graph.spaces import Space, Spaces, Touch


@dataclass(frozen=True)
class Site:
    """The LayerNorms of one stream and everything that writes it."""

    norms: tuple[fx.Node, ...]
    writers: tuple[Touch, ...]
    width: int

    def __str__(self) -> str:
        return f"{len(self.norms)} norms over {self.width} channels, {len(self.writers)} writers"


@dataclass(frozen=True)
class FoldNormMean:
    """See the module's docstring."""

    name: ClassVar[str] = "fold_norm_mean"
    needs: ClassVar[frozenset[str]] = frozenset({"ops.raised"})
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Spaces that LayerNorms read."""
        for space in Spaces.of(prog):
            if not space.mean_pins:
                continue
            reason = self.why_not(prog, space)
            if reason:
                yield Miss(next(iter(space.mean_pins)).name, reason)
            else:
                yield Site(tuple(space.mean_pins), tuple(space.writers), space.width)

    def why_not(self, prog: Program, space: Space) -> str:
        """The reason to refuse, or nothing."""
        if space.pins:
            return f"{space.pins[0][0]}: {space.pins[0][1]}"
        if any(covered != space.width for covered in space.mean_pins.values()):
            return "the norm covers more than one channel space"
        if not all(prog.hosted(n, "layer_norm") for n in space.mean_pins):
            return "the norm is no nn.LayerNorm module of its own, so it cannot be swapped"
        if space.readers or space.norms:
            return "something other than a LayerNorm reads the stream"
        planned = prog.plan is not None and all(prog.plan.is_centred(t.fqn) for t in space.writers)
        if space.made or (not space.inside and not planned):
            return "a graph input, a graph output or an operation lies on the stream"
        return ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """Centre the writers, replace the norms."""
        for touch in site.writers:
            prog.decided.centred.add(touch.fqn)
            prog.derive(touch.fqn, "W - mean(W)", touch.apply(_centre))
            bias = bias_of(prog, touch.node)
            if bias:
                prog.derive(bias, "b - mean(b)", Touch(bias, 0, touch.groups, "writer", touch.node).apply(_centre))
        for node in site.norms:
            with prog.graph.inserting_before(node):
                new = prog.graph.call_function(rms_norm, node.args)
            copy_meta(new, node, self.name, 0)
            new.meta["was"] = "layer_norm"
            node.replace_all_uses_with(new)


def _centre(v: Tensor) -> Tensor:
    return v - v.mean(-1, keepdim=True)
