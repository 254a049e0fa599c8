"""Turn LayerNorms into RMSNorms by taking the mean out of everything that writes their stream.

    LN(x) = RMSNorm(x - mean(x)),   mean-free x  <=>  every writer v of the stream becomes v - mean(v)
    W <- W - (1/D) 1 1ᵀ W,   b <- b - mean(b)          (MQuant, arXiv:2502.00425, equation 10)

Shapes:  stream [*, D]   W [D, K]   b [D]; also embeddings, positions, class tokens [.., D] and patch convolutions.
Why:     RMSNorm commutes with every rotation, LayerNorm only with those that keep the mean.
Needs:   ops.raised
Gives:   nothing: what was refused stays a LayerNorm
Exact:   yes, up to reassociation (fp64 1e-12), where nothing but mean-free norms reads the stream
Refuses: a stream that something else reads (a linear, an output, an RMSNorm), or that an operation or graph input writes;
         a norm that is no module, or that runs over another stream too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from mmqc.graph.changes import Centred
from mmqc.graph.kinds import kind
from mmqc.graph.linear import bias_of
from mmqc.graph.plan import Stream
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.graph.semantic import remove_mean, rms_norm
from mmqc.graph.spaces.boundary import BoundaryError, by_copy, change_inputs, crossings
from mmqc.graph.spaces.spaces import Space, Spaces, Touch


@dataclass(frozen=True)
class Site:
    """The LayerNorms of one stream and everything that writes it."""

    norms: tuple[fx.Node, ...]
    writers: tuple[Touch, ...]
    width: int
    inputs: tuple[tuple[fx.Node, int], ...] = ()

    def __str__(self) -> str:
        explicit = f"; {len(self.inputs)} explicit at the graph's edges" if self.inputs else ""
        modules = {n.meta.get("module") or n.name for n in self.norms}
        return f"{len(modules)} norms over {self.width} channels, {len(self.writers)} writers{explicit}"


@dataclass(frozen=True)
class FoldNormMean(Pass):
    name = "fold_norm_mean"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Spaces that LayerNorms read; in a fragment, also those that the plan says other graphs' LayerNorms read."""
        if prog.plan is None and not prog.nodes("layer_norm"):
            return
        spaces = Spaces.of(prog, through_norms=False)
        for space in spaces:
            stream = self.stream(prog, space)
            if not space.mean_pins and stream is None:
                continue
            reason = self.why_not(prog, space, stream)
            inputs: tuple[tuple[fx.Node, int], ...] = ()
            if not reason and stream is not None:
                try:
                    inputs = tuple(crossings(spaces, [space]).inputs)
                except BoundaryError as error:
                    reason = str(error)
            if reason:
                node = next(iter(space.mean_pins), None) or space.touches[0].node
                yield Miss(node.name, reason, node.meta.get("module", ""))
            else:
                yield Site(tuple(space.mean_pins), tuple(space.writers), space.width, inputs)

    def stream(self, prog: Program, space: Space) -> Stream | None:
        """In a fragment: the stream of the whole model's plan that this space is a part of.

        What comes in at an edge may have a mean, for some of its writers may run outside of any graph: an op removes it.
        """
        if prog.plan is None or space.readers:
            return None
        return prog.plan.stream([*(t.fqn for t in space.writers), *(n.meta.get("gain", "") for n in space.mean_pins)])

    def why_not(self, prog: Program, space: Space, stream: Stream | None) -> str:
        """The reason to refuse, or nothing."""
        if space.pins:
            return space.why_pinned
        if any(covered != space.width for covered in space.mean_pins.values()):
            return "the norm covers more than one copy of the channel space, and each copy has a mean of its own"
        if not all(prog.hosted(n, "layer_norm") for n in space.mean_pins):
            return "the norm is no nn.LayerNorm module of its own, so it cannot be swapped"
        if prog.hosts is not None and (reason := self.why_not_swapped(prog, space)):
            return reason
        if space.readers or space.norms:
            return "something other than a LayerNorm reads the stream"
        if space.made or (not space.inside and stream is None):
            return "a graph input, a graph output or an operation lies on the stream"
        return ""

    def why_not_swapped(self, prog: Program, space: Space) -> str:
        """The reason why an RMSNorm cannot take the module's place, or nothing."""
        modules = {n.meta["module"] for n in space.mean_pins}
        if any(n.meta["module"] in modules for n in prog.nodes("layer_norm") if n not in space.mean_pins):
            return "the norm runs over another stream too"
        return ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """Centre the writers, replace the norms."""
        roots = tuple(t.fqn for t in site.writers if kind(t.node) != "linear")
        norms = tuple(n.meta["gain"] for n in site.norms if "gain" in n.meta)
        prog.decided.streams.append(Stream(tuple(t.fqn for t in site.writers), roots, norms))
        for touch in site.writers:
            prog.derive(touch.fqn, "W - mean(W)", touch.apply(Centred()), touch.axis)
            bias = bias_of(prog, touch.node)
            if bias:
                prog.derive(bias, "b - mean(b)", Touch(bias, 0, touch.groups, "writer", touch.node).apply(Centred()))
        for node in site.norms:  # in place: to the folds the graph stays what it was
            node.target = rms_norm
            node._rename("rms_norm")
            node.meta.update(was="layer_norm", mmqc=(self.name, 0))
        change_inputs(prog, list(site.inputs), lambda x, copies: _centre_input(prog, x, copies, site.width))


def _centre_input(prog: Program, x: fx.Node, copies: int, width: int) -> fx.Node:
    def body(y: fx.Node) -> fx.Node:
        mean = prog.graph.call_method("mean", (y, -1, True))
        return prog.graph.call_function(remove_mean, (y, mean))

    return by_copy(prog, x, copies, width, body, FoldNormMean.name)
