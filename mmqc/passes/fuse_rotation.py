"""Rotate channel spaces by randomized Hadamard matrices that vanish into the weights around them.

    x <- x R:    writers  W <- Rᵀ W,  b <- Rᵀ b        readers  W <- W R        R = diag(±1) H
    where a LayerNorm that kept its mean reads the space:  R <- R (I - 2 w wᵀ), so that 1ᵀ R = 1ᵀ and LN(x R) = LN(x) R
    with ``given`` matrices: R is the one for the space's place, in the coordinates that it has by then (ResQ's bases)

Shapes:  space [*, n]   R [n, n] orthogonal, the same for every space of one width and seed
Why:     a rotation spreads outliers over all channels of a space (QuaRot, arXiv:2404.00456; MQuant section 4).
Needs:   ops.raised
Gives:   nothing: what was refused stays as it is
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a space that anything but weights and unit-scale norms touches: a non-linearity, a gain, an output that users
         see.  In a fragment (one of several graphs of a model) an input or output is allowed where
         the plan of the whole model rotates the space: an explicit ``rotate`` op then stands at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mmqc.graph.changes import Based, Turned
from mmqc.graph.kinds import kind
from mmqc.graph.linear import bias_of
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.spaces.boundary import BoundaryError, Change, Crossings, by_copy, change_inputs, change_outputs, crossings
from mmqc.graph.spaces.coordinates import Source
from mmqc.graph.spaces.spaces import Space, Spaces, Touch
from mmqc.ops.hadamard_matrix import hadamard_cost
from mmqc.ops.rotate import reflect
from mmqc.passes.fold_norm_scale import is_norm

LINEARS = 4


@dataclass(frozen=True)
class Site:
    """Spaces of one width to rotate (one, in a whole model), and where they cross a fragment's edges."""

    spaces: tuple[Space, ...]
    edges: Crossings
    keep_mean: bool = False
    norms: tuple[str, ...] = ()

    def __str__(self) -> str:
        explicit = f"; {self.edges.count} explicit rotate at the graph's edges" if self.edges.count else ""
        if self.norms:
            cost = hadamard_cost(self.spaces[0].width)
            explicit = f"; online behind {', '.join(self.norms)}, {cost:,} multiply-adds a row"
        return f"{'; '.join(map(str, self.spaces))}{', its mean kept' if self.keep_mean else ''}{explicit}"


@dataclass(frozen=True)
class FuseRotation(Pass):
    """Which matrices, and where.

    Attributes:
        seed: of the random signs.
        online: a norm whose gain starts or ends a space may rotate at run time, where it serves ``LINEARS`` linears or more.
        everywhere: it may, however few there are.
        given: R float64 [n, n] by a space's place: the pass takes those spaces alone, rotated before or not, and each once.
    """

    seed: int = 0
    online: bool = False
    everywhere: bool = False
    given: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    name = "fuse_rotation"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every space that weights write and linears read; in a fragment, those that the plan names."""
        spaces = Spaces.of(prog)
        if self.given is not None:
            yield from self.match_given(prog, spaces, self.given)
            return
        eligible: dict[tuple[int, bool], list[Space]] = {}
        alone: dict[str, Miss] = {}
        for space in spaces:
            if space.width < 2:
                why = space.why_pinned or "each channel that it reads stands alone: there is nothing to mix it with"
                alone.update((t.fqn, Miss(t.node.name, why, t.fqn)) for t in space.readers if kind(t.node) != "conv")
                continue
            if not space.touches or _is_done(prog, space):
                continue
            reason = self.why_not_here(prog, space) if prog.fragment else self.why_not(prog, space)
            if reason and space.readers and (space.writers or space.made):
                yield _miss(space, reason)
            elif not reason and prog.fragment:
                eligible.setdefault((space.width, _keeps_mean(prog, space)), []).append(space)
            elif not reason:
                yield self.whole(spaces, space)
        for (_, keep_mean), group in eligible.items():
            yield from self.with_edges(spaces, group, keep_mean)
        if not prog.fragment:
            yield from alone.values()
            yield from unfollowed(spaces)
            yield from self.one_sided(prog, spaces)

    def one_sided(self, prog: Program, spaces: Spaces) -> Iterator[Miss]:
        """Linears none of whose spaces has weights on two sides: what a rotation of one would do, nothing could undo."""
        sides = [space for space in spaces if space.touches]
        two = {t.fqn for space in sides if space.readers and (space.writers or space.made) for t in space.touches}
        for space in sides:
            for touch in space.touches:
                if touch.fqn not in two and touch.node in spaces.found.contractions and kind(touch.node) != "conv":
                    two.add(touch.fqn)
                    yield Miss(touch.node.name, self.why_not(prog, space), touch.fqn)

    def match_given(self, prog: Program, spaces: Spaces, given: Mapping[str, Tensor]) -> Iterator[Site | Miss]:
        """The spaces for which there are matrices; nothing online."""
        for space in spaces:
            if not space.touches or place(space) not in given.keys() - prog.decided.based:
                continue
            reason = "norms over it read its mean" if space.mean_pins else self.why_not(prog, space)
            yield _miss(space, reason) if reason else Site((space,), Crossings())

    def whole(self, spaces: Spaces, space: Space) -> Site | Miss:
        """The site of a space of a whole model; norms that start it rotate what they write."""
        if not space.made and not space.pins:
            return Site((space,), Crossings(), bool(space.mean_pins))
        try:
            edges = crossings(spaces, [space])
        except BoundaryError as error:
            return _miss(space, str(error))
        if any(copies != 1 for *_, copies in (*edges.inputs, *edges.pins)):
            return _miss(space, "a norm covers other channels beside these, so the rotation would have to run online")
        norms = tuple(dict.fromkeys(node.meta["module"] for node, *_ in (*edges.inputs, *edges.pins)))
        if LINEARS * len(norms) > len(space.readers) and not self.everywhere:
            return _miss(space, f"{len(norms)} online rotations ({norms[0]}, ...) would serve {len(space.readers)} linears")
        return Site((space,), edges, bool(space.mean_pins), norms)

    def with_edges(self, spaces: Spaces, group: list[Space], keep_mean: bool) -> Iterator[Site | Miss]:
        """One site for all spaces of a width: they share edges, and R."""
        while group:
            try:
                yield Site(tuple(group), crossings(spaces, group), keep_mean)
                return
            except BoundaryError as error:
                yield from (_miss(space, str(error)) for space in error.spaces)
                group = [space for space in group if space not in error.spaces]

    def why_not(self, prog: Program, space: Space) -> str:
        """The reason to refuse in a whole model, or nothing."""
        pin = next(((n, why) for n, why in space.pins if not (self.online and _ends_at_a_norm(prog, n))), None)
        if pin is not None:
            return f"{pin[0].name}: {pin[1]}"
        stuck = next((s for s in space.made if not (self.online and _starts_at_a_norm(prog, s))), None)
        if stuck is not None:
            return f"{_origin(stuck)}, so the rotation would have to run online"
        if space.inputs or space.outputs:
            return "a graph input or output lies on it"
        if not space.readers or not (space.writers or space.made):
            return "nothing but one side of it is a weight"
        return ""

    def why_not_here(self, prog: Program, space: Space) -> str:
        """The same in a fragment, where the plan decides."""
        if prog.plan is None or not any(prog.plan.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches):
            return "the whole model's plan leaves it alone"
        if not any(prog.is_quantized(t.fqn) for t in space.touches):
            return "no linear of this graph that it touches is quantized"
        return "a LayerNorm of this graph reads it" if space.mean_pins and not _keeps_mean(prog, space) else ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """Multiply R into every touch; at a fragment's edges put rotate ops."""
        if self.given is None:
            turn = Turned.of(site.spaces[0].width, self.seed, site.keep_mean)
        else:
            turn = Based(self.given[place(site.spaces[0])])
            prog.decided.based.add(place(site.spaces[0]))
        for touch in (t for space in site.spaces for t in space.touches):
            if not prog.decided.is_rotated(touch.fqn, touch.axis, touch.groups):
                prog.decided.rotate(touch.fqn, touch.axis, touch.groups)
            if site.keep_mean:
                prog.decided.mean_kept.add((touch.fqn, touch.axis))
            prog.derive(touch.fqn, f"rotated {touch.role} axis {touch.axis}", touch.apply(turn), touch.axis)
            bias = bias_of(prog, touch.node) if touch.role == "writer" and touch.axis == 0 else ""
            if bias:
                prog.derive(bias, "rotated bias", Touch(bias, 0, touch.groups, "writer", touch.node).apply(turn))
        prog.touched |= {(gain, 0) for space in site.spaces for gain in space.gains}  # what these norms write is rotated online
        if site.edges.count and isinstance(turn, Turned):
            wide = torch.promote_types(prog.weights[site.spaces[0].touches[0].fqn].dtype, torch.float32)
            note = (self.seed, site.keep_mean)
            change_outputs(prog, site.edges, _explicit(prog, turn, wide, note, inverse=True))
            change_inputs(prog, site.edges.inputs, _explicit(prog, turn, wide, note, inverse=False))


def unfollowed(spaces: Spaces) -> Iterator[Miss]:
    """Linears that no space says anything about."""
    for reader in spaces.found.readers:
        x = spaces.found.contractions[reader.node].x
        if reader.ids is None and kind(x) != "placeholder" and kind(reader.node) != "conv":
            yield Miss(reader.node.name, f"{x.name}: nothing is known of the channels of a {kind(x)}", reader.fqn)


def place(space: Space) -> str:
    """A name for a space: where the first of its coordinates lies on a weight; rotations do not change it."""
    fqn, axis, index = min((t.fqn, t.axis, int(t.groups.min())) for t in space.touches)
    return f"{fqn} {axis} {index}"


def _starts_at_a_norm(prog: Program, source: Source) -> bool:
    """Whether a norm module that can be swapped writes it: gain and all."""
    module = source.node.meta.get("module")
    return source.what == "gain" and source.fqn == f"{module}.weight" and prog.hosted(source.node, "layer_norm")


def _ends_at_a_norm(prog: Program, node: fx.Node) -> bool:
    """Whether a pin is the gain of a norm module that can be swapped."""
    operands = {str(n.target) if n.op == "get_attr" else n for n in node.all_input_nodes}
    norms = [n for n in node.all_input_nodes if is_norm(n)]
    wanted = {f"{node.meta.get('module')}.weight", *norms}
    return kind(node) == "mul" and len(norms) == 1 and operands == wanted and prog.hosted(node, "layer_norm")


def _origin(source: Source) -> str:
    """What writes a space that is no linear's, embedding's or parameter's."""
    if source.what == "gain":
        return f"{source.fqn or 'a computed gain'} scales what {source.node.name} writes"
    return f"{source.node.name} ({kind(source.node)}) writes it"


def _is_done(prog: Program, space: Space) -> bool:
    return any(prog.decided.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches)


def _miss(space: Space, reason: str) -> Miss:
    return Miss(space.touches[0].node.name, reason, ", ".join(sorted({t.fqn for t in space.touches})))


def _keeps_mean(prog: Program, space: Space) -> bool:
    """Whether the plan of the whole model keeps this space's mean."""
    assert prog.plan is not None
    return any((t.fqn, t.axis) in prog.plan.mean_kept for t in space.touches)


def _explicit(prog: Program, turn: Turned, wide: torch.dtype, note: tuple[int, bool], inverse: bool) -> Change:
    """Rotate ops at a graph's edge, or behind a norm."""
    n = len(turn.signs)

    def body(x: fx.Node) -> fx.Node:
        nodes = [prog.constant_node(f"rotation_{n}_{i}", f.to(wide)) for i, f in enumerate(turn.factors)]
        sign = prog.constant_node(f"rotation_{n}_signs", turn.signs.to(wide))
        mirror = None if turn.mirror is None else prog.constant_node(f"rotation_{n}_mirror", turn.mirror.to(wide))
        call, given = prog.graph.call_function, x
        if inverse and mirror is not None:
            x = call(reflect, (x, mirror))
        y = call(torch.ops.mmqc.rotate.default, (x, nodes, sign, inverse))
        copy_meta(y, given, FuseRotation.name, 0)
        y.meta["rotation"] = note
        return call(reflect, (y, mirror)) if not inverse and mirror is not None else y

    return lambda x, copies: by_copy(prog, x, copies, n, body, FuseRotation.name)
