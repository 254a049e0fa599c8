"""Where a program's tokens may stand in modality order, and where it costs least to change the order.

Every node that commutes with a permutation of its tokens (token_rules.py) may compute in either order; the quantized
linears of the language model want modality order, all the rest is in sequence order.  Where a node in one order reads a
node in the other, a gather moves the bytes.  The minimal cut of that graph is the region that moves the fewest bytes, and
the largest of those that move equally few.

    flat   one permutation of all rows of the batch: [B, L, ...] <-> [1, B L, ...]; only row-wise operations
    else   one permutation for each sequence; also what lies around attention, and attention's queries, or keys and values
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.memory import written
from mmqc.graph.program import VISUAL, Program
from mmqc.graph.sizes import is_sequence, n_bytes, sizes
from mmqc.graph.tokens.rules import TokenRules
from mmqc.graph.tokens.uses import ATTENTION, SHAPE_ONLY, Use, Uses, attention, is_attention

WITH_VISUAL = {"quantize": 2, "scaled_matmul": 5, "tag_modality": 1}  # where these have their visual mask
SOURCE, SINK = "source", "sink"
NEVER = 1 << 62  # the capacity of an edge that may not be cut
START = 1 << 20  # what it costs to start a gather, in bytes that could be moved meanwhile


def visual_operand(node: fx.Node) -> fx.Node | None:
    """The visual mask that one of our operations reads."""
    place = WITH_VISUAL.get(kind(node))
    if place is None or node.op != "call_function":
        return None
    visual = node.kwargs.get("visual", node.args[place] if len(node.args) > place else None)
    return visual if isinstance(visual, fx.Node) else None


def visual_mask(prog: Program) -> fx.Node | None:
    """The mask that most operations read, or the program's own placeholder for it."""
    found = Counter(v for n in prog.graph.nodes if (v := visual_operand(n)) is not None and len(sizes(v) or ()) == 2)
    if found:
        return found.most_common(1)[0][0]
    return next((n for n in prog.graph.nodes if n.op == "placeholder" and n.target == VISUAL and sizes(n)), None)


def empty_cut() -> nx.DiGraph[Hashable]:
    """A graph to cut: the edges that lead from the source's side to the sink's cost their capacities."""
    cut: nx.DiGraph[Hashable] = nx.DiGraph()
    cut.add_nodes_from((SOURCE, SINK))
    return cut


def add_edge(cut: nx.DiGraph[Hashable], a: Hashable, b: Hashable, capacity: int = NEVER) -> None:
    """What it costs if ``a`` is on the source's side and ``b`` is not; edges between the same two add up."""
    before = cut.edges[a, b]["capacity"] if cut.has_edge(a, b) else 0
    cut.add_edge(a, b, capacity=before + capacity)


def source_side(cut: nx.DiGraph[Hashable]) -> set[Hashable]:
    """The largest source side among the minimal cuts: all from which the sink cannot be reached."""
    return nx.minimum_cut(cut, SOURCE, SINK, flow_func=boykov_kolmogorov)[1][0]


def price(node: fx.Node) -> int:
    """What it costs to give a tensor another order; a tuple of tensors cannot be gathered."""
    return NEVER if is_sequence(node) else START + n_bytes(node)


def nested(prog: Program) -> dict[fx.Node, fx.Node]:
    """Nodes under a vmap, whose shapes lack an axis, and the call that closes it."""
    found: dict[fx.Node, fx.Node] = {}
    inside: list[fx.Node] = []
    depth = 0
    for node in prog.graph.nodes:
        word = kind(node)
        depth += word == "_vmap_increment_nesting"
        if depth:
            inside.append(node)
        if word == "_vmap_decrement_nesting":
            depth -= 1
            if not depth:
                found |= dict.fromkeys(inside, node)  # type: ignore[arg-type]
                inside = []
    return found


@dataclass
class Tokens:
    """The plan.

    Attributes:
        visual: the node of the visual mask.
        flat: whether batch and sequence are permuted as one axis.
        axis: every node that computes in modality order, and the axis of its tokens.
        keys: attention calls whose keys and values come in modality order.
        forced: the nodes that the region was built around.
        refused: nodes that should be in the region and cannot, with the reason.
        gathers: how many tensors change their order.
        moved: bytes that these gathers read and write, at the sizes that the graph is compiled for.
        borders: kinds of the operations at which tokens go back to sequence order, and how often.
    """

    visual: fx.Node
    flat: bool
    axis: dict[fx.Node, int] = field(default_factory=dict)
    keys: set[fx.Node] = field(default_factory=set)
    forced: set[fx.Node] = field(default_factory=set)
    refused: list[tuple[fx.Node, str]] = field(default_factory=list)
    gathers: int = 0
    moved: int = 0
    borders: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, prog: Program, visual: fx.Node, flat: bool) -> Tokens:
        """Find the region of ``prog``."""
        planner = _Planner(prog, visual, flat)
        planner.find()
        return planner.solve()


class _Planner:
    """Candidates by following the rules from the quantized linears, then the cut."""

    def __init__(self, prog: Program, visual: fx.Node, flat: bool) -> None:
        size = sizes(visual)
        assert size is not None
        self.prog, self.visual, self.flat = prog, visual, flat
        self.rules = TokenRules(*size, flat)  # type: ignore[misc]
        self.rows = size
        self.number = {n: i for i, n in enumerate(prog.graph.nodes)}
        self.written, self.nested = written(prog), nested(prog)
        self.uses: dict[fx.Node, Uses] = {}
        self.plan = Tokens(visual, flat)

    # -- candidates ------------------------------------------------------------------------------------------------
    def seeds(self) -> Iterator[fx.Node]:
        """Operations with the visual mask; in a model that is not quantized, the linears behind a tag, or all."""
        ours = [n for n in self.prog.graph.nodes if visual_operand(n) is self.visual]
        quantized = [n for n in ours if kind(n) != "tag_modality"]
        if quantized:
            yield from quantized
            return
        linears = [n for n in self.prog.nodes("linear") if len(sizes(n) or ()) == 3 and (sizes(n) or ())[:2] == self.rows]
        behind = set(ours)
        for node in self.prog.graph.nodes if ours else ():
            if any(n in behind for n in node.all_input_nodes):
                behind.add(node)
        yield from (n for n in linears if not ours or n in behind)

    def accept(self, node: fx.Node, axis: int) -> str:
        """Make a node a candidate, or say why it is none."""
        if self.number[node] < self.number[self.visual]:
            return "it is computed before the visual mask is known"
        if node in self.nested:
            return "it runs under a vmap"
        if node in self.written:
            return "its memory is written to in place"
        uses = self.rules.operands(node, axis)
        if isinstance(uses, str):
            return uses
        self.uses[node], self.plan.axis[node] = uses, axis
        return ""

    def find(self) -> None:
        """Follow the rules from the seeds to operands and users."""
        todo = []
        for node in self.seeds():
            reason = self.accept(node, 1)
            if reason:
                self.plan.refused.append((node, reason))
            else:
                self.plan.forced.add(node)
                todo.append(node)
        while todo:
            node = todo.pop()
            for operand, use in self.uses[node].items():
                fits = len(sizes(operand) or ()) == use.rank and operand.op in ("call_function", "call_method")
                if fits and operand not in self.uses and not self.accept(operand, use.axis):
                    todo.append(operand)
            todo += [user for user in node.users if user not in self.uses and self.follow(node, user)]

    def follow(self, node: fx.Node, user: fx.Node) -> bool:
        """Make a user a candidate if some axis of it has the tokens of ``node``."""
        mine = self.plan.axis[node]
        for axis in range(1, len(sizes(user) or ())):
            uses = self.rules.operands(user, axis)
            if not isinstance(uses, str) and uses.get(node) == Use(mine, len(sizes(node) or ())):
                return not self.accept(user, axis)
        return False

    def matches(self, operand: fx.Node, use: Use) -> bool:
        """Whether a candidate's tokens are where a use wants them."""
        return self.plan.axis.get(operand) == use.axis and len(sizes(operand) or ()) == use.rank

    def attention_keys(self) -> Iterator[tuple[fx.Node, Uses]]:
        """Attention calls whose keys, values and mask can be permuted together."""
        for node in filter(is_attention, self.prog.nodes(ATTENTION) if not self.flat else ()):
            given = attention(node)
            uses: Uses = {}
            for word in ("key", "value"):
                size = sizes(given[word]) or ()
                if len(size) < 3 or size[0] != self.rows[0] or size[-2] != self.rows[1]:
                    break
                uses[given[word]] = Use(len(size) - 2, len(size))
            else:
                mask = given.get("attn_mask")
                mask_size = sizes(mask)
                if given.get("dropout_p", 0.0) != 0.0 or (given.get("is_causal") and node not in self.uses):
                    continue
                whole = mask is None or (mask_size is not None and mask_size[-1] in (1, self.rows[1]))
                if whole and not {node} & (self.written | self.nested.keys()) and given["query"] not in uses and mask not in uses:
                    yield node, uses

    # -- the cut ---------------------------------------------------------------------------------------------------
    def solve(self) -> Tokens:
        """Cut, keep the candidates on the linears' side, count what is moved."""
        plan, cut = self.plan, empty_cut()
        keys = dict(self.attention_keys())
        for node in plan.forced:
            add_edge(cut, SOURCE, node)
        for node, uses in self.uses.items():
            self.edges(cut, node, uses)
        for node, uses in keys.items():
            self.edges(cut, (node, "keys"), uses)
            mask = attention(node).get("attn_mask")
            if attention(node).get("is_causal"):
                add_edge(cut, (node, "keys"), node)  # a causal flag becomes a mask, which the queries' order is needed for
            if isinstance(mask, fx.Node):
                if (mask, "mask") not in cut:
                    add_edge(cut, (mask, "mask"), SINK, price(mask))
                add_edge(cut, (node, "keys"), (mask, "mask"))
        for node in self.uses:
            if self.sequence_readers(node, {n: u for n, u in keys.items() if node in u}):
                add_edge(cut, (node, "leave"), SINK)
            add_edge(cut, node, (node, "leave"), price(node))
            add_edge(cut, (node, "enter"), node, price(node))
        side = source_side(cut) if plan.forced else set()
        plan.axis = {n: a for n, a in plan.axis.items() if n in side}
        plan.keys = {n for n in keys if (n, "keys") in side and any(k in side for k in keys[n])}
        self.count({n: u for n, u in keys.items() if n in plan.keys})
        return plan

    def edges(self, cut: nx.DiGraph[Hashable], node: object, uses: Uses) -> None:
        """What it costs if ``node`` and its operands are in different orders."""
        for operand, use in uses.items():
            if self.matches(operand, use):
                add_edge(cut, (operand, "leave"), node)
                add_edge(cut, node, (operand, "enter"))
            else:
                if (operand, use) not in cut:
                    add_edge(cut, (operand, use), SINK, price(operand))
                add_edge(cut, node, (operand, use))

    def sequence_readers(self, node: fx.Node, keys: dict[fx.Node, Uses]) -> list[fx.Node]:
        """Users that read ``node`` in sequence order whatever happens."""
        found = []
        for user in node.users:
            use = self.uses.get(user, {}).get(node)
            use = use or keys.get(user, {}).get(node)
            if kind(user) not in SHAPE_ONLY and (use is None or not self.matches(node, use)):
                found.append(user)
        return found

    def count(self, keys: dict[fx.Node, Uses]) -> None:
        """Gathers and bytes of the plan."""
        plan = self.plan
        entered: set[tuple[fx.Node, Use]] = set()
        for node in plan.axis:
            entered |= {(o, u) for o, u in self.uses[node].items() if not (o in plan.axis and self.matches(o, u))}
            back = []
            for user in node.users:
                use = keys.get(user, {}).get(node) or (self.uses[user].get(node) if user in plan.axis else None)
                if kind(user) not in SHAPE_ONLY and (use is None or not self.matches(node, use)):
                    back.append(user)
            if back:
                plan.gathers += 1
                plan.moved += 2 * n_bytes(node)
                plan.borders[kind(back[0])] += 1
        for uses in keys.values():
            entered |= {(o, u) for o, u in uses.items() if not (o in plan.axis and self.matches(o, u))}
        masks = {attention(n).get("attn_mask") for n in keys} - {None}
        entered |= {(m, Use(-1, 0)) for m in masks if isinstance(m, fx.Node) and (sizes(m) or (1,))[-1] != 1}
        plan.gathers += len(entered)
        plan.moved += sum(2 * n_bytes(operand) for operand, _ in entered)
