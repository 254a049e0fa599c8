"""Layers that are alike are compiled once: the graph is cut at them, and one compiled function is called for each.

    ...patches | layer 0 | layer 1 | ... | layer 27 | norm, head          ->  4 compilations instead of one of all that

A layer is a module that has siblings of its class, at least ``LEAST`` of them together; Dynamo says of every node which modules it
was traced in, outermost first.  Two parts are alike if their nodes, with the shapes and dtypes of what goes in, read the same.

    why     most of a compilation's time goes by the number of nodes: tracing, scheduling, code generation
    cost    a call of Python for each layer, and no fusion across the cut, where the residual stream passes in one tensor
    not     where CUDA graphs are recorded: a graph per layer costs more at run time than it saves
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sympy import Symbol
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from mmqc.graph.kinds import kind
from mmqc.graph.sizes import EXAMPLE

LEAST = 4
MODES = {"_enter_autocast", "_exit_autocast", "_set_grad_enabled"}
GROUP = {("group", "str"), ("group_name", "str"), ("group_name", "Any")}  # how operations take the name of a group of ranks

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Depends = Callable[[fx.GraphModule, Sequence[Any]], object]


@dataclass(frozen=True)
class Regions:
    """A graph that was compiled in parts.

    Attributes:
        forward: takes the graph's inputs.
        order: of the parts as they are called, each by its number among those that were compiled.
        calls: the graph of their calls.
        meeting: the names of parts in which ranks of a process group wait for each other.
    """

    forward: Callable[..., Any]
    order: tuple[int, ...]
    calls: fx.GraphModule
    meeting: frozenset[str]

    def halves(self, late: Collection[int]) -> Halves | None:
        """Cut in front of the first part that needs an input of ``late``; None where fewer than ``LEAST`` parts are before it.

        Nor does the first half meet other ranks: run ahead of its call, it would meet them in another order than theirs.
        """
        nodes = list(self.calls.graph.nodes)
        holders = [n for n in nodes if n.op == "placeholder"]
        known = {holder for i, holder in enumerate(holders) if i not in late}
        first: list[fx.Node] = []
        for node in (n for n in nodes if n.op != "placeholder"):
            if node.op == "output" or node.target in self.meeting or not known.issuperset(node.all_input_nodes):
                break
            first.append(node)
            known.add(node)
        inside = set(first)
        crossing = [n for n in first if any(u not in inside for u in n.users)]
        if sum(n.op == "call_module" for n in first) < LEAST or len(first) + len(holders) + 1 >= len(nodes):
            return None
        reads = {i for i, holder in enumerate(holders) if any(u in inside for u in holder.users)}
        head = _function(self.calls, (), (*holders, *first), crossing)
        tail = _function(self.calls, crossing, [n for n in nodes if n not in inside])
        return Halves(head, tail, reads)


@dataclass(frozen=True)
class Halves:
    """A graph in two.

    Attributes:
        head: takes the graph's inputs, gives what crosses the cut.
        tail: takes what crosses the cut, then the graph's inputs; gives the graph's results.
        reads: places of the inputs that the head reads.
    """

    head: Callable[..., Any]
    tail: Callable[..., Any]
    reads: set[int]


def _function(gm: fx.GraphModule, given: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node] = ()) -> Any:
    """Some nodes of a graph as a function of what others gave, and of the inputs among them.

    It returns ``results``, unless the graph's output is among the nodes.
    """
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in given:
        known[node] = graph.placeholder(f"given_{node.name}")
    for node in nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    if nodes[-1].op != "output":
        graph.output(tuple(known[n] for n in results))
    return fx.GraphModule(gm, graph).forward


def compile_by_regions(gm: fx.GraphModule, inputs: Sequence[Any], compile_: Compile, depends: Depends) -> Regions | None:
    """The graph compiled part by part, like parts once; None where too little is alike, or it cannot be cut.

    Args:
        gm: a graph of Dynamo; left as it is.
        inputs: its example inputs.
        compile_: compiles a part for its example inputs.
        depends: what else the compilation of a part goes by.
    """
    if any(isinstance(x, Tensor) and x.requires_grad for x in inputs) and torch.is_grad_enabled():
        return None
    gm = fx.GraphModule(gm, _copied(gm.graph))
    part = _parts(gm)
    if part is None or not _make_contiguous(gm, part) or _switches(gm, part):
        return None
    split = split_module(gm, gm, part.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    calls = split.graph.find_nodes(op="call_module")
    known = dict(zip(split.graph.find_nodes(op="placeholder"), inputs, strict=True))
    parts = [_Part.of(split.get_submodule(str(node.target)), node, known, depends) for node in calls]  # type: ignore[arg-type]
    if 3 * len({p.text for p in parts}) > 2 * len(parts):
        return None
    meeting = frozenset(str(node.target) for p, node in zip(parts, calls, strict=True) if _meets(p.module))
    done: dict[str, _Compiled] = {}
    order, count = [], 0
    for p, node in zip(parts, calls, strict=True):
        first = done.get(p.text)
        if first is None or not first.holds_for(p):
            first = done[p.text] = _Compiled.of(p, compile_, count)
            count += 1
        order.append(first.number)
        setattr(split, str(node.target), _Call(first.function))
    split.recompile()
    return Regions(split.forward, tuple(order), split, meeting)


@dataclass(frozen=True)
class _Part:
    """A part of a graph.

    Attributes:
        module: its graph.
        inputs: examples of what it takes.
        sizes: where the guards of its inputs' sizes are, if any is a symbol.
        symbols: in the sizes of its inputs, in order; ``text`` has their places in it.
        text: two with the same are compiled alike, whatever their symbols, if the same guards hold.
    """

    module: fx.GraphModule
    inputs: list[Any]
    sizes: Any
    symbols: tuple[Any, ...]
    text: str

    @classmethod
    def of(cls, module: fx.GraphModule, call: fx.Node, known: dict[fx.Node, Any], depends: Depends) -> _Part:
        """A module that ``call`` calls; ``known`` has the graph's own inputs, with their values."""
        traced = [n.meta[EXAMPLE] for n in module.graph.find_nodes(op="placeholder")]
        inputs = [_by_its_symbol(known.get(node, value)) for node, value in zip(call.args, traced, strict=True)]  # type: ignore[call-overload]
        words = _Words()
        lines = [words.of(*pair) for pair in zip(traced, inputs, strict=True)]
        text = [*lines, *words.ranges(), *_nodes(module), str(depends(module, inputs))]
        return cls(module, inputs, words.sizes, tuple(words.symbols), "\n".join(text))


@dataclass(frozen=True)
class _Compiled:
    """The first of parts that are alike, its number, and what its compilation took for granted."""

    part: _Part
    number: int
    function: Callable[..., Any]
    guards: list[Any]

    @classmethod
    def of(cls, part: _Part, compile_: Compile, number: int) -> _Compiled:
        before = len(part.sizes.guards) if part.sizes is not None else 0
        function = compile_(part.module, part.inputs)
        return cls(part, number, function, [g.expr for g in part.sizes.guards[before:]] if part.sizes is not None else [])

    def holds_for(self, other: _Part) -> bool:
        """Guard the sizes of another part as this one's were guarded; whether they hold now."""
        same = dict(zip(self.part.symbols, other.symbols, strict=True))
        return all(bool(other.sizes.evaluate_expr(guard.xreplace(same))) for guard in self.guards if guard.free_symbols & {*same})


class _Call(nn.Module):
    """A compiled part in its module's place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Run it."""
        return self.function(*args)


def _meets(module: fx.GraphModule) -> bool:
    """Whether an operation takes the name of a group of ranks."""
    for node in (n for part in module.modules() if isinstance(part, fx.GraphModule) for n in part.graph.nodes):
        schema = getattr(getattr(node.target, "default", node.target), "_schema", None)
        if schema is not None and any((a.name, str(a.type)) in GROUP for a in schema.arguments):
            return True
    return False


def _parts(gm: fx.GraphModule) -> dict[fx.Node, int] | None:
    """The number of the part of each node that is computed, in order; None without layers enough."""
    calls = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    layers = _layers(calls)
    if not layers:
        return None
    part: dict[fx.Node, int] = {}
    number, here, opening = 0, None, _opening(calls)
    for node in calls:
        source = node.args[0] if kind(node) == "getitem" else None
        if source in part and isinstance(source.meta.get(EXAMPLE), tuple | list):  # a tuple cannot cross a cut
            part[node] = part[source]
            continue
        computed = opening.get(node)
        stack = _stack(node if computed is None else computed)
        layer = next((path for path in stack if path in layers), None) if stack else here
        if layer != here:
            number, here = number + 1, layer
        part[node] = number
    return part if number <= 2 * len(layers) + LEAST else None


def _opening(calls: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes that switch a mode, each with the first node that is computed in it; those that switch it back are left out.

    Dynamo says of none of them which module it was traced in.
    """
    found: dict[fx.Node, fx.Node] = {}
    waiting: list[fx.Node] = []
    gradients = False  # whether their mode is switched
    for node in calls:
        if _stack(node):
            found.update(dict.fromkeys(waiting, node))
            waiting = []
        elif kind(node) == "_set_grad_enabled":
            gradients = not gradients
            waiting += [node] * gradients
        elif kind(node) == "_enter_autocast":
            waiting.append(node)
    return found


def _layers(calls: Sequence[fx.Node]) -> set[str]:
    """The outermost modules that have siblings of their class."""
    members: dict[tuple[str, Any], set[str]] = {}
    for node in calls:
        outer = ""
        for path, cls in (node.meta.get("nn_module_stack") or {}).values():
            members.setdefault((outer, cls), set()).add(path)
            outer = path
    found: set[str] = set()
    for (outer, _), paths in sorted(members.items(), key=lambda item: len(item[0][0])):
        if len(paths) >= LEAST and outer not in found:
            found |= paths
    return found


def _stack(node: fx.Node) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))  # type: ignore[arg-type]
    return new


def _make_contiguous(gm: fx.GraphModule, part: dict[fx.Node, int]) -> bool:
    """Make every tensor that crosses a cut contiguous; False where something else crosses, or what shares memory with it leaves.

    A part is compiled for strides, and what the part in front gives has those that Inductor's trace gives it: not always those
    of the trace by Dynamo (a ``cat`` with nothing, for one).  Views of the graph's inputs are the exception, which AOTAutograd
    makes from the inputs themselves: a copy would hide what is written to them.
    """
    given = {_memory(n.meta.get(EXAMPLE)) for n in gm.graph.nodes if n not in part and n.op != "output"}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    ends = _ends(gm, part)
    leaving = {n: [u for u in n.users if part.get(u) != part.get(n)] for n in order}  # the output is in no part
    shared = Counter(_memory(n.meta.get(EXAMPLE)) for n, users in leaving.items() if users)
    for node, outside in leaving.items():
        users = [u for u in outside if u.op != "output"]
        value = node.meta.get(EXAMPLE)
        if users and not isinstance(value, Tensor | torch.SymInt | int):
            return False
        if not users or not isinstance(value, Tensor) or _memory(value) in given:
            continue
        if shared[_memory(value)] > 1:
            return False
        behind = max(ends[part[node]], node, key=order.__getitem__)  # what its own part writes to it, too
        with gm.graph.inserting_after(behind):
            even = gm.graph.call_method("contiguous", (node,))
        even.meta = {**node.meta, EXAMPLE: _contiguous(value)}
        part[even] = part[node]
        for user in outside:  # the output too: other parts may write to it
            user.replace_input_with(node, even)
    return True


def _ends(gm: fx.GraphModule, part: dict[fx.Node, int]) -> dict[int, fx.Node]:
    """The last node of each part that no later part's stands in front of: what takes a tuple apart may come later."""
    ends: dict[int, fx.Node] = {}
    here = 0
    for node in gm.graph.nodes:
        if part.get(node, -1) >= here:
            here = part[node]
            ends[here] = node
    return ends


def _switches(gm: fx.GraphModule, part: dict[fx.Node, int]) -> bool:
    """Whether a mode goes on or off in a graph whose parts are mixed: ``split_module`` keeps modes for parts in order alone."""
    numbers = [part[node] for node in gm.graph.nodes if node in part]
    return numbers != sorted(numbers) and any(kind(node) in MODES for node in gm.graph.nodes)


def _memory(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _contiguous(value: Any) -> Tensor:
    with value.fake_mode:
        return value.new_empty(value.shape)  # strides by the sizes, however the value came to be contiguous


def _by_its_symbol(value: Any) -> Any:
    """A size that was found to equal another, as that one: generated code names it so, and a part may not know it otherwise."""
    if not isinstance(value, torch.SymInt) or not isinstance(value.node.expr, Symbol) or value.node._expr == value.node.expr:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


def _nodes(module: fx.GraphModule) -> list[str]:
    """What a part computes, in words."""
    number = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        what = id(getattr(module, node.target, None)) if node.op == "get_attr" else node.target
        what = what if isinstance(what, str | int) else f"{what} {id(what)}"
        given = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        lines.append(node.op if node.op == "placeholder" else f"{node.op} {what} {given}")
    return lines


class _Words:
    """Says of inputs what a compilation depends on: symbols and shared memory by their order of appearance."""

    def __init__(self) -> None:
        self.symbols: dict[Any, str] = {}
        self.memory: dict[int, int] = {}
        self.sizes: Any = None

    def of(self, traced: Any, value: Any) -> str:
        """One input, by what stood for it in the trace; ``value`` is the input itself, if it is there."""
        if not isinstance(traced, Tensor):
            return f"{type(traced).__name__} {self.size(traced)}"
        shared = self.memory.setdefault(value.untyped_storage()._cdata, len(self.memory))
        layout = [self.size(n) for n in (*traced.shape, *traced.stride(), traced.storage_offset())]
        return f"{type(value).__name__} {traced.dtype} {traced.device} {layout} in {shared} {traced.requires_grad}"

    def size(self, value: Any) -> str:
        """A number, or an expression in numbered symbols."""
        if not isinstance(value, torch.SymInt):
            return str(value)
        self.sizes, expr = value.node.shape_env, value.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            self.symbols.setdefault(symbol, f"z{len(self.symbols)}")
        return str(expr.xreplace({s: Symbol(name) for s, name in self.symbols.items()}))

    def ranges(self) -> list[str]:
        """What is known of the symbols."""
        return [f"{name} {self.sizes.var_to_range.get(symbol)}" for symbol, name in self.symbols.items()]
