"""Fold a norm's gain and bias into the linears that read it.

    W (g * n(x) + β) + b  =  (W diag(g)) n(x) + (b + W β)

Shapes:  x [*, K]   g, β [K]   W [N, K]   b [N]
Why:     a rotation commutes with n but not with g (SliceGPT, arXiv:2401.15024; SpinQuant, arXiv:2405.16406).
Needs:   ops.raised
Gives:   nothing that the next pass must rely on: what was refused stays a pin of its space
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a gain read by anything but linears' inputs; a gain whose expression has no neutral value;
         a bias that would go into a linear whose weight is computed or that is no module's, or that zero padding keeps off
         some rows, or that a factor or a sum changes on its way; a gain or bias that something else uses too.
A merged patch (Qwen-VL's merger) reads the same gain several times over: its columns are scaled block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.changes import Moved, Times
from mmqc.graph.kinds import kind
from mmqc.graph.linear import bias_of, set_bias
from mmqc.graph.program import Miss, Program, copy_meta, dtype_of
from mmqc.graph.runner import Pass
from mmqc.graph.spaces.boundary import BoundaryError, by_copy, change_inputs, crossings
from mmqc.graph.spaces.coordinates import MOVES, SAME, Gain, weights_behind
from mmqc.graph.spaces.spaces import Space, Spaces, Touch
from mmqc.graph.spaces.uses import only_in


@dataclass(frozen=True)
class Site:
    """All multiplications by one gain, the additions of its bias, and the linears that read the result."""

    gain: str
    neutral: float
    muls: tuple[Gain, ...]
    adds: tuple[fx.Node, ...]
    bias: str
    readers: tuple[Touch, ...]
    index: Tensor

    def __str__(self) -> str:
        return f"{self.gain} -> {', '.join(sorted({t.fqn for t in self.readers}))}"


@dataclass(frozen=True)
class EdgeSite:
    """In a fragment: linears whose norm is in another graph, so that gain and bias are undone where its output comes in."""

    gain: str
    neutral: float
    bias: str
    inputs: tuple[tuple[fx.Node, int], ...]
    readers: tuple[Touch, ...]
    index: Tensor

    def __str__(self) -> str:
        return f"{self.gain} -> {', '.join(sorted({t.fqn for t in self.readers}))}; explicit at the graph's edge"


@dataclass(frozen=True)
class FoldNormScale(Pass):
    name = "fold_norm_scale"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | EdgeSite | Miss]:
        """Gains by name; every call of a shared norm must be foldable, or none is."""
        spaces = Spaces.of(prog, through_norms=False)
        by_name: dict[str, list[Gain]] = {}
        for gain in spaces.found.gains:
            by_name.setdefault(gain.source.fqn, []).append(gain)
        for name, gains in by_name.items():
            if not any(is_norm(g.x) for g in gains):
                continue  # fold_layer_scale has had its say
            space = next((s for s in spaces if name in s.gains), None)
            reason = self.why_not(prog, spaces, name, gains, space)
            if space is None or reason:
                yield Miss(gains[0].node.name, reason or "its channels do not stay together", name)
            else:
                yield self.site(prog, name, gains, space)
        for space in spaces if prog.plan is not None else ():
            yield from self.at_edge(prog, spaces, space)

    def at_edge(self, prog: Program, spaces: Spaces, space: Space) -> Iterator[EdgeSite | Miss]:
        """Spaces that come in from another graph and whose readers took in a gain in the whole model."""
        assert prog.plan is not None
        gains = {prog.plan.gains[t.fqn][:3] for t in space.readers if t.fqn in prog.plan.gains and prog.is_quantized(t.fqn)}
        if not gains or not space.inputs:
            return
        first = space.readers[0]
        if (
            len(gains) > 1
            or space.writers
            or space.made
            or space.pins
            or space.outputs
            or any(t.fqn not in prog.plan.gains for t in space.readers)
        ):
            yield Miss(first.node.name, "a norm of another graph scales it, and something else touches it here", first.fqn)
            return
        gain, bias, neutral = gains.pop()
        try:
            inputs = crossings(spaces, [space]).inputs
        except BoundaryError as error:
            yield Miss(first.node.name, str(error), first.fqn)
            return
        yield EdgeSite(gain, neutral, bias, tuple(inputs), tuple(space.readers), prog.plan.gains[first.fqn][3][first.groups[0]])

    def why_not(self, prog: Program, spaces: Spaces, name: str, gains: list[Gain], space: Space | None) -> str:
        """The reason to refuse, or nothing."""
        if not name or "," in name:
            return "the gain is computed from activations or from several weights"
        if not all(is_norm(g.x) for g in gains):
            return "what it scales is no norm's output"
        if space is None:
            return "its channels do not stay together"
        if len(space.made) != 1 or len(space.gains[name]) != prog.weights[name].numel():
            return "other operations write the same channels"
        if neutral_value(prog, gains[0].factor, name) is None:
            return "no value of the weight makes this gain 1"
        return self.why_not_read(prog, space) or self.why_not_bias(prog, spaces, gains, space)

    def why_not_bias(self, prog: Program, spaces: Spaces, gains: list[Gain], space: Space) -> str:
        """The reason why a reader might not get the gain on every row, and the bias once; or nothing."""
        scaled = {g.node for g in gains}
        if not only_in(prog, gains[0].source.fqn, scaled):
            return "something else reads the gain's weight"
        bias = space.writers[0].fqn if space.writers else ""
        if not bias:
            return ""
        adds = _adds(gains, bias)
        if any(u not in adds for node in scaled for u in node.users) or not only_in(prog, bias, set(adds)):
            return "its bias is not added to every use of it, or is used elsewhere"
        stray = _not_moved(adds, spaces.found.contractions)
        if stray is not None:
            return f"{stray.name}: its bias does not reach a linear unchanged"
        for touch in space.readers:
            use = spaces.found.contractions[touch.node]
            ids = spaces.found.shadows[use.x].movedim(use.channel, -1)
            if (ids[..., touch.groups.reshape(-1)] < 0).any() or _pads(touch.node):
                return f"{touch.node.name}: some rows have no bias"
            own = bias_of(prog, touch.node) or (kind(touch.node) == "linear" and prog.hosted(touch.node, "linear"))
            if not own or not use.whole:
                return f"{touch.node.name}: it has no bias of its own to take this one in"
        return ""

    def why_not_read(self, prog: Program, space: Space) -> str:
        """The reason why what reads and writes the scaled channels forbids the fold, or nothing."""
        if space.pins:
            return space.why_pinned
        if space.norms or space.mean_pins:
            return "another norm reads it"
        if space.inputs or space.outputs:
            return "a graph input or output lies on it"
        if not space.readers:
            return "no linear reads it"
        if any(t.axis != 0 or prog.weights[t.fqn].dim() != 1 for t in space.writers) or len(space.writers) > 1:
            return f"{space.writers[0].fqn} writes the same channels"
        return ""

    def site(self, prog: Program, name: str, gains: list[Gain], space: Space) -> Site:
        """Everything that ``rewrite`` needs."""
        bias = space.writers[0].fqn if space.writers else ""
        neutral = neutral_value(prog, gains[0].factor, name)
        assert neutral is not None
        adds = _adds(gains, bias)
        return Site(name, neutral, tuple(gains), adds, bias, tuple(space.readers), space.gains[name])

    def rewrite(self, prog: Program, site: Site | EdgeSite) -> None:
        """Scale the readers' columns, move the bias, neutralise the norm's weights, drop the nodes."""
        if isinstance(site, EdgeSite):
            self.rewrite_edge(prog, site)
        else:
            self.rewrite_whole(prog, site)

    def rewrite_whole(self, prog: Program, site: Site) -> None:
        """W <- W diag(g), b <- b + W β, g <- 1, β <- 0."""
        g = prog.constant(site.muls[0].factor, {site.gain: prog.snapshot(site.gain)()})[..., site.index.cpu()]
        for touch in site.readers:
            if site.bias:
                beta = prog.snapshot(site.bias)()[site.index]
                _move_bias(prog, touch, beta)
            prog.decided.gains[touch.fqn] = (
                site.gain,
                site.bias,
                site.neutral,
                _by_column(prog.weights[touch.fqn].shape[touch.axis], touch, site.index),
            )
            prog.derive(touch.fqn, f"W diag({site.gain})", touch.apply(Times(g)), touch.axis)
        prog.derive(site.gain, f"{site.neutral:g}", _fill(site.neutral))
        if site.bias:
            prog.derive(site.bias, "0", _fill(0.0))
        for gain in site.muls:
            gain.node.replace_all_uses_with(as_wide(prog, gain, self.name))
        for add in site.adds:
            add.replace_all_uses_with(next(n for n in add.all_input_nodes if site.bias not in weights_behind(n)))

    def rewrite_edge(self, prog: Program, site: EdgeSite) -> None:
        """X -> (x - β) / g as it comes in, then as in the whole model."""
        assert prog.outside is not None
        g = prog.outside(site.gain).detach().double()[site.index] + (1.0 - site.neutral)
        beta = prog.outside(site.bias).detach().double()[site.index] if site.bias else None
        for touch in site.readers:
            if beta is not None:
                _move_bias(prog, touch, beta)
            prog.derive(touch.fqn, f"W diag({site.gain})", touch.apply(Times(g)), touch.axis)

        dtype = prog.weights[site.readers[0].fqn].dtype

        def undo(x: fx.Node) -> fx.Node:
            if beta is not None:
                x = prog.graph.call_method("sub", (x, prog.constant_node(f"{site.bias}.out", beta.to(dtype))))
            return prog.graph.call_method("div", (x, prog.constant_node(f"{site.gain}.out", g.to(dtype))))

        change_inputs(prog, list(site.inputs), lambda x, copies: by_copy(prog, x, copies, len(g), undo, self.name))


def _adds(gains: list[Gain], bias: str) -> tuple[fx.Node, ...]:
    """The additions of a norm's bias."""
    users = dict.fromkeys(u for g in gains for u in g.node.users if bias)
    return tuple(u for u in users if kind(u) == "add" and bias in weights_behind_any(u))


def _not_moved(starts: tuple[fx.Node, ...], ends: Container[fx.Node]) -> fx.Node | None:
    """The first operation between ``starts`` and the ``ends`` behind them that does more than move elements."""
    todo, seen = list(starts), set(starts)
    while todo:
        for user in todo.pop().users:
            if user not in ends and (kind(user) == "neg" or kind(user) not in MOVES | SAME):
                return user
            if user not in seen and user not in ends:
                seen.add(user)
                todo.append(user)
    return None


def weights_behind_any(node: fx.Node) -> set[str]:
    """Names of the weights among a node's operands."""
    return {name for n in node.all_input_nodes for name in weights_behind(n)}


def is_norm(node: fx.Node) -> bool:
    """Whether it is a norm's output, perhaps behind a cast."""
    while kind(node) in ("to", "float", "type_as", "type", "half", "bfloat16"):
        node = node.args[0]  # type: ignore[assignment]
    return kind(node) in ("rms_norm", "layer_norm")


def neutral_value(prog: Program, factor: fx.Node, name: str) -> float | None:
    """The value of the weight at which the gain is 1: 1 for w, 0 for 1 + w, 64 for tanh(w) (1 there in every dtype)."""
    weight = prog.weights[name]
    for value in (1.0, 0.0, 64.0):
        filled = torch.full(weight.shape, value, dtype=torch.float64, device="cpu" if weight.is_meta else weight.device)
        gain = prog.constant(factor, {name: filled})
        if torch.equal(gain, torch.ones_like(gain)):
            return value
    return None


def _by_column(width: int, touch: Touch, index: Tensor) -> Tensor:
    columns = torch.full((width,), -1)
    columns[touch.groups] = index
    return columns


def as_wide(prog: Program, gain: Gain, name: str) -> fx.Node:
    """The operand of a gain in the dtype of its product: a float32 norm times a wider or narrower gain changes it."""
    had, has = dtype_of(gain.node), dtype_of(gain.x)
    if had is None or had == has:
        return gain.x
    with prog.graph.inserting_before(gain.node):
        cast = prog.graph.call_method("to", (gain.x, had))
    copy_meta(cast, gain.node, name, 0)
    return cast


def _pads(node: fx.Node) -> bool:
    """Whether a convolution reads zeros beside its input."""
    if kind(node) != "conv":
        return False
    padding = node.kwargs.get("padding", node.args[4] if len(node.args) > 4 else 0)
    return padding not in ("valid", 0) and any(padding if isinstance(padding, tuple | list) else (1,))


def _fill(value: float) -> Callable[[Tensor], Tensor]:
    return lambda w: torch.full_like(w, value)


def _move_bias(prog: Program, touch: Touch, beta: Tensor) -> None:
    weight = prog.snapshot(touch.fqn)
    into = bias_of(prog, touch.node)
    if not into:
        into = set_bias(prog, touch.node)

    moved = Moved(touch.axis, touch.groups, beta)
    prog.history.setdefault(touch.fqn, []).append(moved)
    prog.derive(into, f"b + {touch.fqn} β", lambda b: b + moved(weight().to(b)))
