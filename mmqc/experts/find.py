"""Find the modules that hold the linears of all experts of a mixture in stacked parameters, from the recorded graph.

    y = down_e(gate(up_e(x), ...))        up_e, down_e: W[e] of a parameter [E, N, K], or W[e]ᵀ of one [E, K, N]

What counts is what the recording shows: parameters of three axes that products read one expert at a time (or all at once, in
a grouped or a batched product), and between them operations that act on every row alike.  No names are looked at.  A module
that was found is called once as we read it, in floating point, and must give what it gave by itself: only then is it replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mmqc.calibration.observe import Output, observe
from mmqc.errors import MmqcError
from mmqc.experts.call import BATCHED, ROUTED, SORTED, ExpertCall, Rows
from mmqc.experts.pointwise import ALONG_ROWS, WORDS, Pointwise, encoded
from mmqc.graph.hooks import PATCHED, is_patched, saves
from mmqc.graph.kinds import kind
from mmqc.graph.linear import Contraction, contraction
from mmqc.graph.program import Program

PRODUCTS = ("linear", "matmul", "grouped_mm")
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative, of the output
Multiply = Callable[["Stack", Tensor, Rows], Tensor]


class NotExpertsError(MmqcError):
    """Why a module with stacked parameters is left as it is."""


@dataclass(frozen=True)
class Stack:
    """A parameter that holds one linear per expert: its name, its bias's, and whether it is [E, K, N]."""

    fqn: str
    bias: str | None
    transposed: bool


@dataclass(frozen=True)
class ExpertLayer:
    """A module of experts as we read it.

    Attributes:
        module: its FQN.
        call: how it is called.
        up: the stacks that read its input.
        gate, down: what follows; None for a single stack.
        node: a product of it, for reports.
    """

    module: str
    call: ExpertCall
    up: tuple[Stack, ...]
    gate: Pointwise | None
    down: Stack | None
    node: str

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All of them, in the order of computation."""
        return self.up if self.down is None else (*self.up, self.down)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], multiply: Multiply) -> Tensor:
        """A call with another product in place of the stacks'."""
        rows = self.call.rows(args, kwargs)
        y = [multiply(stack, rows.x, rows) for stack in self.up]
        if self.gate is None or self.down is None:
            return rows.finish(y[0])
        return rows.finish(multiply(self.down, self.gate(*y), rows))


def dense(model: nn.Module, stack: Stack) -> Tensor:
    """The weights [E, N, K] as a view."""
    w = model.get_parameter(stack.fqn).detach()
    return w.mT if stack.transposed else w


def multiplier(model: nn.Module) -> Multiply:
    """The stacks' own product, in floating point."""

    def multiply(stack: Stack, x: Tensor, rows: Rows) -> Tensor:
        w, bounds = dense(model, stack), rows.offsets.tolist()
        bias = None if stack.bias is None else model.get_parameter(stack.bias).detach()
        y = x.new_zeros((x.shape[0], w.shape[1]))
        for e in range(len(w)):
            if bounds[e] < bounds[e + 1]:
                part = x[bounds[e] : bounds[e + 1]]
                y[bounds[e] : bounds[e + 1]] = F.linear(part, w[e], None if bias is None else bias[e])
        return y

    return multiply


def products(prog: Program) -> dict[str, dict[str, list[tuple[fx.Node, Contraction]]]]:
    """Nodes that multiply by a stacked parameter: by the module that owns it, then by its name."""
    found: dict[str, dict[str, list[tuple[fx.Node, Contraction]]]] = {}
    for node in prog.nodes(*PRODUCTS, "_grouped_mm"):
        use = contraction(prog, node)
        if use is not None and prog.weights[use.fqn].dim() == 3:
            found.setdefault(use.fqn.rpartition(".")[0], {}).setdefault(use.fqn, []).append((node, use))
    return found


def find_experts(model: nn.Module, prog: Program, batch: Mapping[str, Any]) -> tuple[list[ExpertLayer], list[tuple[str, str, str]]]:
    """Every module of experts that can be replaced, and (FQN, node, reason) of every stack that cannot.

    Args:
        model: what was recorded.
        prog: its recording.
        batch: keyword arguments for a forward, in which each module is compared with our reading of it.
    """
    layers: list[ExpertLayer] = []
    refused: list[tuple[str, str, str]] = []
    readings: dict[str, Any] = {}
    owned = products(prog)
    for module, uses in owned.items():
        try:
            _check_attached(model.get_submodule(module))
            readings[module] = _read(model, prog, module, uses)
        except NotExpertsError as why:
            readings[module] = why
    calls = _compare(model, {m: r for m, r in readings.items() if not isinstance(r, NotExpertsError)}, batch)
    for module, uses in owned.items():
        outcome = calls.get(module, readings[module])
        if isinstance(outcome, ExpertLayer):
            layers.append(outcome)
        else:
            reason = str(outcome) if isinstance(outcome, NotExpertsError) else "no call of its module was seen"
            refused += [(fqn, nodes[0][0].name, reason) for fqn, nodes in uses.items()]
    return layers, refused


def _check_attached(module: nn.Module) -> None:
    """Raise a NotExpertsError for what a user hung on a module and would be lost; other hooks go over to the one in its place."""
    what = PATCHED if is_patched(module) else saves(module)
    if what:
        raise NotExpertsError(f"its module has a {what}, of which quantized experts would know nothing")


@dataclass(frozen=True)
class _Reading:
    up: tuple[Stack, ...]
    gate: Pointwise | None
    down: Stack | None
    experts: int
    node: str


def _read(model: nn.Module, prog: Program, module: str, uses: Mapping[str, list[tuple[fx.Node, Contraction]]]) -> _Reading:
    """What the stacks of one module compute.

    Raises:
        NotExpertsError: something else than the formula at the top.
    """
    by_node = {node: use for nodes in uses.values() for node, use in nodes}
    for fqn, nodes in uses.items():
        if len({use.reads for _, use in nodes}) > 1 or any(use.reads not in (1, 2) for _, use in nodes):
            raise NotExpertsError(f"its products read {fqn} along different axes")
        if any(node.meta.get("module") != module for node, _ in nodes):
            raise NotExpertsError(f"another module multiplies by {fqn}")
    firsts = [nodes[0][0] for nodes in uses.values()]
    walks = {node: _Walk(prog, module, by_node, by_node[node].x) for node in firsts}
    later = [node for node in firsts if walks[node].inputs]
    if len(firsts) == 1:
        stacks, gate = (_stack(prog, by_node, firsts[0], _bias_behind(prog, firsts[0])),), None
        down = None
    elif len(later) != 1:
        raise NotExpertsError(f"{len(later)} of its {len(firsts)} stacks read what others compute; one does in a mixture")
    else:
        walk = walks[later[0]]
        if {by_node[n].fqn for n in walk.inputs} != {by_node[n].fqn for n in firsts if n is not later[0]}:
            raise NotExpertsError("some stack's result does not reach the last one")
        if walk.problem:
            raise NotExpertsError(walk.problem)
        stacks = tuple(_stack(prog, by_node, n, walk.biases.get(n)) for n in walk.inputs)
        down = _stack(prog, by_node, later[0], _bias_behind(prog, later[0]))
        gate = Pointwise(len(stacks), walk.steps)
    everything = (*stacks, down) if down is not None else stacks
    _check_parameters(model, module, everything)
    experts = {prog.weights[s.fqn].shape[0] for s in everything}
    if len(experts) != 1:
        raise NotExpertsError(f"its stacks hold {sorted(experts)} experts")
    return _Reading(stacks, gate, down, experts.pop(), firsts[0].name)


def _stack(prog: Program, by_node: Mapping[fx.Node, Contraction], node: fx.Node, bias: str | None) -> Stack:
    use = by_node[node]
    outputs = prog.weights[use.fqn].shape[use.writes]
    if bias is not None and prog.weights[bias].shape[1] != outputs:
        raise NotExpertsError(f"{bias} does not fit the outputs of {use.fqn}")
    return Stack(use.fqn, bias, use.reads == 1)


def _check_parameters(model: nn.Module, module: str, stacks: Iterable[Stack]) -> None:
    ours = {n for s in stacks for n in (s.fqn, s.bias)}
    for name, _ in model.get_submodule(module).named_parameters():
        if f"{module}.{name}".lstrip(".") not in ours:
            raise NotExpertsError(f"its module has another parameter, {name}")


def _picked_bias(prog: Program, node: Any) -> str | None:
    """The stored vectors [E, N] of which ``node`` picks some."""
    if not isinstance(node, fx.Node) or kind(node) not in ("getitem", "index_select", "select") or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "get_attr" or prog.weights[str(source.target)].dim() != 2:
        return None
    return str(source.target)


def _bias_behind(prog: Program, node: fx.Node) -> str | None:
    """The bias that is added to a product, if that is all that becomes of it."""
    for user in node.users:
        for other in user.args if kind(user) == "add" else ():
            if other is not node and (bias := _picked_bias(prog, other)) is not None:
                return bias
    return None


class _Walk:
    """Backwards from a product's input, through operations of the module, to the products that they start from."""

    def __init__(self, prog: Program, module: str, by_node: Mapping[fx.Node, Contraction], start: fx.Node) -> None:
        self.prog, self.module, self.by_node = prog, module, by_node
        self.inputs: list[fx.Node] = []
        self.biases: dict[fx.Node, str] = {}
        self.problem = ""
        self._raw: list[tuple[str, list[Any], dict[str, Any]]] = []
        self._known: dict[fx.Node, Any] = {}
        end = self.visit(start)
        if self.inputs and not self._raw and self.problem == "" and end != ("input", 0):
            self.problem = "nothing lies between its stacks"
        self.steps = [] if self.problem else [self.step(*raw) for raw in self._raw]

    def visit(self, node: fx.Node) -> Any:
        """("input", i) or ("step", i) for the value of ``node``; None where it comes from elsewhere."""
        if node not in self._known:
            self._known[node] = self.look(node)
        return self._known[node]

    def look(self, node: fx.Node) -> Any:
        if node in self.by_node:
            self.inputs.append(node)
            return ("input", len(self.inputs) - 1)
        if node.op not in ("call_function", "call_method"):
            return None
        if not f"{node.meta.get('module', '')}.".startswith(f"{self.module}."):
            return None
        word, args, kwargs = kind(node), list(node.args), {k: v for k, v in node.kwargs.items() if k != "inplace"}
        if word == "masked_fill":  # rows of absent experts, which are not computed at all here
            return self.visit(args[0])  # type: ignore[arg-type]
        for i, arg in enumerate(args if word == "add" else ()):
            bias, other = _picked_bias(self.prog, arg), args[1 - i]
            if bias is not None and isinstance(other, fx.Node) and (place := self.visit(other)) is not None:
                return self.biased(place, bias)
        places = {a: self.visit(a) for a in node.all_input_nodes}
        if not places or all(p is None for p in places.values()):
            return None
        if word not in WORDS or (word in ALONG_ROWS and not _last_axis(word, args, kwargs)):
            self.problem = self.problem or f"{word} between its stacks is not known to act on every row alike"
        elif any(p is None for p in places.values()):
            self.problem = self.problem or f"{word} between its stacks reads something else too"
        put = lambda v: places[v] if isinstance(v, fx.Node) else v  # noqa: E731
        self._raw.append((word, [put(a) for a in args], {k: put(v) for k, v in kwargs.items()}))
        return ("step", len(self._raw) - 1)

    def biased(self, place: Any, bias: str) -> Any:
        if place[0] != "input":
            self.problem = self.problem or f"{bias} is added behind another operation"
        else:
            self.biases[self.inputs[place[1]]] = bias
        return place

    def step(self, word: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """As data: the inputs count first."""

        def reference(value: Any) -> Any:
            if isinstance(value, tuple) and len(value) == 2 and value[0] in ("input", "step"):
                return {"value": value[1] + (len(self.inputs) if value[0] == "step" else 0)}
            return encoded(value)

        try:
            return {"op": word, "args": [reference(a) for a in args], "kwargs": {k: reference(v) for k, v in kwargs.items()}}
        except TypeError as why:
            self.problem = f"{word} between its stacks: {why}"
            return {}


def _last_axis(word: str, args: list[Any], kwargs: Mapping[str, Any]) -> bool:
    position = 1 if word == "glu" else 2
    axis = kwargs.get("dim", args[position] if len(args) > position else -1 if word == "glu" else 0)
    return axis == -1


def _calls(signature: inspect.Signature, experts: int, given: Mapping[str, Any]) -> Iterable[ExpertCall]:
    """The forms that a call with these arguments may have."""
    names = tuple(signature.parameters)
    tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
    floats = [n for n, v in tensors.items() if v.is_floating_point() and v.dim() >= 2]
    integers = [n for n, v in tensors.items() if not v.is_floating_point() and v.dtype != torch.bool]
    lists = [n for n, v in given.items() if isinstance(v, list) and len(v) == experts]
    for x in floats:
        yield from (ExpertCall(SORTED, names, (x, counts), experts) for counts in lists)
        for index in integers:
            if tensors[index].shape == (experts,):
                yield ExpertCall(SORTED, names, (x, index), experts)
            for w in floats:
                if w != x and tensors[w].shape == tensors[index].shape:
                    yield ExpertCall(ROUTED, names, (x, index, w), experts)
        if tensors[x].shape[:-1].numel() % experts == 0:
            yield ExpertCall(BATCHED, names, (x,), experts)


@torch.no_grad()
def _compare(model: nn.Module, readings: Mapping[str, _Reading], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Run the model once; return for each module the reading that reproduces its output, or why there is none."""
    outcomes: dict[str, Any] = {}
    multiply = multiplier(model)

    def compare(name: str, output: Any, args: Any, kwargs: Any) -> None:
        if name in outcomes:
            return
        reading = readings[name]
        signature = inspect.signature(model.get_submodule(name).forward)
        given = signature.bind(*args, **kwargs).arguments
        if not isinstance(output, Tensor):
            outcomes[name] = NotExpertsError(f"its module returns a {type(output).__name__}")
            return
        best = float("inf")
        for call in _calls(signature, reading.experts, given):
            layer = ExpertLayer(name, call, reading.up, reading.gate, reading.down, reading.node)
            error = _difference(layer, args, kwargs, output, multiply)
            if error <= CLOSE.get(output.dtype, 0.0):
                outcomes[name] = layer
                return
            best = min(best, error)
        outcomes[name] = NotExpertsError(
            f"read as a mixture of experts, its module's output differs from what it gives by {best:.1e} of its size"
        )

    if readings:
        with observe(model, {Output(name): partial(compare, name) for name in readings}):
            model(**batch)
    return outcomes


def _difference(layer: ExpertLayer, args: Any, kwargs: Any, output: Tensor, multiply: Multiply) -> float:
    try:
        ours = layer.run(args, kwargs, multiply)
    except (RuntimeError, IndexError, TypeError, ValueError):  # shapes of another form
        return float("inf")
    if ours.shape != output.shape or ours.dtype != output.dtype:
        return float("inf")
    size = output.double().norm()
    error = (ours.double() - output.double()).norm()
    return float(error / size) if size else float(error)
