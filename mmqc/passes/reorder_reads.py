"""What the host reads of the inputs is read before anything else runs: split sizes, counts of placeholders, their checks.

    y = f(x);  n = item(g(ids));  assert n == 16;  split(y, n)  ->  n = item(g(ids));  assert n == 16;  y = f(x);  split(y, 16)

Shapes:  any; g is arithmetic on whole numbers
Why:     at a read the host waits for all that was launched before it, such as a whole tower, and the device then waits for the
         host.  Order alone does not help: for CUDA graphs Inductor schedules whatever it can in front of a read.  So what stands
         in front is marked, and run_time.py runs it before the compiled graph, which has no read left to be cut at.
Needs:   nothing
Gives:   nothing
Exact:   yes; a number that the graph goes on to use is the one that it was traced for, which one more check makes sure of, or, in
         a graph for any size, what its check compares it with: n = item(...); assert n == rows // 4; split(y, n)  ->  rows // 4
Refuses: a read of what is not computed from inputs by arithmetic on whole numbers (products, lookups and floats stay where they
         are); of memory that the graph writes to; a number that the graph uses and that its checks leave open.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.memory import written
from mmqc.graph.program import KEPT, Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import EXAMPLE, value_of

EARLY = "early"  # in the meta of a node: it runs before the compiled graph
READS = frozenset(("item", "_local_scalar_dense"))
CHECKS = frozenset(("_assert_scalar", "_assert", "_check", "_check_is_size", "sym_constrain_range", "sym_constrain_range_for_size"))
ARITHMETIC = frozenset(
    (
        "add",
        "sub",
        "rsub",
        "mul",
        "floordiv",
        "floor_divide",
        "div",
        "mod",
        "remainder",
        "neg",
        "abs",
        "pow",
        "prod",
        "sum",
        "cumsum",
        "max",
        "min",
        "amax",
        "amin",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "logical_and",
        "logical_or",
        "logical_not",
        "all",
        "any",
        "_is_all_true",
        "sym_ite",
        "not",
        "sym_not",
        "sym_min",
        "sym_max",
        "sym_sum",
        "where",
        "clamp",
        "getitem",
        "getattr:shape",
        "getattr:T",
        "size",
        "numel",
        "select",
        "narrow",
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "unbind",
        "transpose",
        "permute",
        "contiguous",
        "clone",
        "detach",
        "to",
        "long",
        "int",
        "bool",
        "diff",
        "count_nonzero",
    )
)


@dataclass(frozen=True)
class Site:
    """A read, and with it what it is computed from and its checks, in order."""

    read: fx.Node
    nodes: tuple[fx.Node, ...]
    used: tuple[fx.Node, ...]  # results that the rest of the graph uses

    def __str__(self) -> str:
        known = ((n.name, number(n), equal_by_check(n)) for n in self.used)
        return f"{self.read.name}, {len(self.nodes)} operations" + "".join(
            f", {name} = {same if value is None else value}" for name, value, same in known if (value, same) != (None, None)
        )


@dataclass(frozen=True)
class ReorderReads(Pass):
    name = "reorder_reads"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Reads, in order."""
        place = {n: i for i, n in enumerate(prog.graph.nodes)}
        changed = shared_with(prog, written(prog))
        for read in prog.graph.nodes:
            if word(read) not in READS:
                continue
            found = ancestors(read)
            reason = next((r for n in sorted(found, key=place.__getitem__, reverse=True) if (r := why_late(n, changed))), "")
            nodes = sorted(with_checks(found, prog), key=place.__getitem__)
            used = tuple(n for n in from_reads(nodes) if not set(nodes).issuperset(n.users))
            unknown = [n.name for n in used if not has_other(n)]
            if reason or unknown:
                yield Miss(read.name, reason or f"the graph uses {unknown[0]}, which its checks leave open")
                continue
            yield Site(read, tuple(n for n in nodes if n.op != "placeholder"), used)

    def rewrite(self, prog: Program, site: Site) -> None:
        """To the front, in order; the rest gets the same numbers without a read."""
        own = set(site.nodes)
        first = next(n for n in prog.graph.nodes if n.op != "placeholder" and EARLY not in n.meta and n not in own)
        for node in site.nodes:
            if EARLY not in node.meta:
                first.prepend(node)
                node.meta[EARLY] = True
        made: dict[fx.Node, int | fx.Node] = {}
        for node in site.used:
            late = [u for u in node.users if EARLY not in u.meta]
            with prog.graph.inserting_before(first):
                other = self.other(prog, node, made)
            for user in late:
                args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n, old=node, new=other: new if n is old else n)
                user.args, user.kwargs = args, kwargs  # type: ignore[assignment]

    def other(self, prog: Program, node: fx.Node, made: dict[fx.Node, int | fx.Node]) -> int | fx.Node:
        """What stands in the rest for a number of the front: a constant, its equal, or the same of what it is computed from."""
        if node not in made:
            value, same = number(node), equal_by_check(node)
            if value is not None:
                made[node] = value
                equal = prog.graph.call_function(operator.eq, (node, value))
                message = f"{node.name} is not {value}, for which this graph was compiled"
                check = prog.graph.call_function(torch.ops.aten._assert_scalar.default, (equal, message))
                for new in (equal, check):
                    copy_meta(new, node, self.name, 0)
                    new.meta.update({EARLY: True, KEPT: True})
            elif same is not None:
                made[node] = same
            else:
                inner = {n: n if of_sizes(n) else self.other(prog, n, made) for n in node.all_input_nodes}
                args, kwargs = fx.map_arg((node.args, node.kwargs), inner.__getitem__)
                new = made[node] = prog.graph.create_node(node.op, node.target, args, kwargs)  # type: ignore[arg-type]
                copy_meta(new, node, self.name, 0)
                given, more = fx.map_arg((args, kwargs), value_of)
                new.meta.update({EARLY: True, EXAMPLE: node.target(*given, **more)})  # type: ignore[operator]
        return made[node]


def word(node: fx.Node) -> str:
    """The operation's name, the same for an overload as for the function that it belongs to."""
    return kind(node).removesuffix(".default")


def ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all that it is computed from."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        last = todo.pop()
        if last not in found:
            found.add(last)
            todo += last.all_input_nodes
    return found


def with_checks(nodes: set[fx.Node], prog: Program) -> set[fx.Node]:
    """And the numbers that are computed from numbers among them, with the checks of these, and what checks compare them with."""
    found, sized = set(nodes), set[fx.Node]()
    for node in prog.graph.nodes:
        inner = [n for n in node.all_input_nodes if n.op != "placeholder"]
        if of_sizes(node):
            sized.add(node)
            continue
        wanted = word(node) in CHECKS or (is_number(node) and word(node) in ARITHMETIC)
        if wanted and any(is_number(n) and n in found for n in inner) and (found | sized).issuperset(inner):
            found |= {node, *(ancestors(node) & sized)}
    return found


def of_sizes(node: fx.Node) -> bool:
    """Whether the node is a size of the inputs, or a number that is computed from sizes alone."""
    if node.op == "placeholder":
        return is_number(node)
    return is_number(node) and word(node) in ARITHMETIC and bool(node.all_input_nodes) and all(map(of_sizes, node.all_input_nodes))


def equal_by_check(node: fx.Node) -> fx.Node | None:
    """The number, of sizes alone, that a check compares this one with; None without such a check."""
    for equal in node.users:
        if word(equal) == "eq" and any(word(u) == "_assert_scalar" for u in equal.users):
            others = [n for n in equal.args if n is not node]
            if len(others) == 1 and isinstance(others[0], fx.Node) and of_sizes(others[0]):
                return others[0]
    return None


def has_other(node: fx.Node) -> bool:
    """Whether the graph can do without this number, which a read gave or which is computed from one."""
    if number(node) is not None or equal_by_check(node) is not None:
        return True
    again = node.op == "call_function" and word(node) not in READS and is_number(node) and word(node) in ARITHMETIC
    return again and all(of_sizes(n) or has_other(n) for n in node.all_input_nodes)


def from_reads(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of the nodes, in order, that are reads or computed from one: the rest of the graph cannot compute them again."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if word(node) in READS or any(n in found for n in node.all_input_nodes):
            found[node] = None
    return list(found)


def why_late(node: fx.Node, changed: set[fx.Node]) -> str:
    """The reason why a node cannot run before all others, or nothing."""
    if node in changed:
        return f"the graph writes to {node.name}"
    if node.op not in ("placeholder", "get_attr") and word(node) not in ARITHMETIC | READS:
        return f"it depends on {node.name}"
    value = value_of(node)
    whole = not (value.is_floating_point() or value.is_complex()) if isinstance(value, Tensor) else True
    return "" if whole and not isinstance(value, float | torch.SymFloat) else f"{node.name} is no whole number"


def is_number(node: fx.Node) -> bool:
    """Whether the node's value is one number for the host."""
    return isinstance(value_of(node), int | torch.SymInt | torch.SymBool)


def number(node: fx.Node) -> int | None:
    """The number that a node was traced for, where the graph holds for no other."""
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return value.node.maybe_as_int()
    if isinstance(value, torch.SymBool):
        return value.node.maybe_as_bool()
    return value if isinstance(value, int) else None


def shared_with(prog: Program, changed: set[fx.Node]) -> set[fx.Node]:
    """And the inputs that lie in the same memory, or that an operation writes to which says so in its schema."""
    found = set(changed)
    for node in prog.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found.update(n for n in node.all_input_nodes)
    places = {storage(n) for n in found} - {None}
    return found | {n for n in prog.graph.nodes if n.op == "placeholder" and storage(n) in places}


def storage(node: fx.Node) -> int | None:
    """Which memory a node's value lies in; None where that is unknown."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else None
