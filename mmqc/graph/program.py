"""The program: a captured graph, its weights by name, the weights derived from them, and what each pass did.

Weights are derived, never mutated: a pass says ``prog.derive("a.weight", "W diag(g)", fn)`` and the new value is
computed in float64 from the sources when it is asked for, so it can be computed again for another checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mmqc.graph import meta
from mmqc.graph.changes import Placed, Step, Unknown
from mmqc.graph.kinds import kind, mutates
from mmqc.graph.plan import Plan

Watch = Callable[[fx.Node, Any, list[Any], dict[str, Any]], None]
SLICE = 1 << 23  # elements of a weight that are in float64 at a time
KEPT = "kept"  # meta: the node does something besides its result
READ = "read"  # meta: somebody looked at the values of its operands, and who; the node has no result
LOOKS = "Python looks at its values, and may decide by them"  # who, if it was nobody's hook
VISUAL = "mmqc_visual"  # the placeholder of the visual mask
LOOSE = "_constant_"  # tensors that are no parameter or buffer: they cannot be written back


@dataclass(frozen=True)
class Derived:
    """A weight computed from another version of itself: its formula, for people, and the function.

    ``axis`` is the one that the function works on, all slices across it alike; None if it needs the whole weight.
    """

    formula: str
    compute: Callable[[Tensor], Tensor]
    axis: int | None = None


@dataclass(frozen=True)
class Miss:
    """A place that a pass looked at and left alone, and why."""

    node: str
    reason: str
    fqn: str = ""

    def __str__(self) -> str:
        return f"{self.fqn or self.node}: {self.reason}"


@dataclass
class PassRecord:
    """What one pass did: sites, misses, milliseconds, and how the operation counts changed."""

    name: str
    exact: bool
    sites: list[str] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    ms: float = 0.0
    delta: dict[str, int] = field(default_factory=dict)
    before: str = ""
    after: str = ""

    @property
    def n_sites(self) -> int:
        """How many places were rewritten."""
        return len(self.sites)

    def __str__(self) -> str:
        delta = "  ".join(f"{k} {v:+d}" for k, v in sorted(self.delta.items()) if v)
        tier = "exact" if self.exact else "changes numerics"
        return f"{self.name:22s} {tier:16s} {self.n_sites:4d} sites {len(self.misses):3d} refused {self.ms:8.1f} ms  {delta}"


class Program:
    """A captured graph.

    Attributes:
        graph: FX graph at torch-function level; ``get_attr`` nodes name weights by FQN.
        weights: every tensor that a ``get_attr`` node names, as it was captured.
        inputs: values of the placeholders in order (tensors, numbers), from the captured call.
        tied: FQNs that share one tensor, as a map from each FQN to the whole group.
        fragment: whether this is one of several graphs (Dynamo's), so that inputs and outputs are other graphs' tensors.
        plan: decisions of an earlier, whole recording that a fragment has to follow, or None.
        decided: what the passes decided on this program.
        hosts: FQN of each module that can be swapped, by kind (``linear``, ``layer_norm``); None means no limit.
        statistics: calibration results by FQN, or None.
        solved: what the weight solvers returned, by FQN.
        outside: in a fragment, weights of the model that other graphs use, by FQN.
        visual: bool [B, L], the visual tokens of the captured call, where that is known.
        records: one ``PassRecord`` per pass, in order.
        notes: what the capture could not do, in words.
        called: FQNs of the modules that ran.
        handed: the float activations that each of them was given or gave back.
        unsure: weights that must stay as they are, and why (see mmqc/nn/unseen.py).
        work: the device that derived weights are computed on; None means where each weight is.
        touched: weights that a pass has changed, each with the axis that it worked on.
        history: by weight, everything that passes did to it, and to the bias behind it, written back or not.
        traced: the folder of this program's trace, once there is one (trace.py).
    """

    def __init__(self, graph: fx.Graph, weights: Mapping[str, Tensor], inputs: list[Any], *, fragment: bool = False) -> None:
        self.graph = graph
        self.weights = dict(weights)
        self.inputs = inputs
        self.fragment = fragment
        self.tied: dict[str, tuple[str, ...]] = {}
        self.plan: Plan | None = None
        self.decided = Plan()
        self.hosts: dict[str, set[str]] | None = None
        self.statistics: Mapping[str, Any] | None = None
        self.records: list[PassRecord] = []
        self.analysis: tuple[int, Any] | None = None  # a hash of the graph, and its channel spaces
        self.notes: list[str] = []
        self.called: set[str] = set()
        self.handed: dict[str, set[fx.Node]] = {}
        self.unsure: dict[str, str] = {}
        self.work: torch.device | None = None
        self.traced: Path | None = None
        self.sketches: dict[fx.Node, Any] = {}  # results in a recording, see meta.sketch: no pass changes a shape
        self.solved: dict[str, Any] = {}
        self.visual: Tensor | None = None
        self.outside: Callable[[str], Tensor] | None = None
        self.touched: set[tuple[str, int]] = set()
        self.history: dict[str, list[Step]] = {}
        self._derived: dict[str, list[Derived]] = {}
        self._values: dict[str, tuple[int, int, Tensor]] = {}  # address of the base, number of steps, value

    # -- weights ---------------------------------------------------------------------------------------------------
    def derive(self, name: str, formula: str, compute: Callable[[Tensor], Tensor], axis: int | None = None) -> None:
        """Queue ``compute`` (float64 in, float64 out) as the next step from the captured ``name`` to its new value."""
        if name not in self.weights:
            raise KeyError(f"{name} is no weight of this program")
        self._derived.setdefault(name, []).append(Derived(formula, compute, axis))
        self.history.setdefault(name, []).append(compute if isinstance(compute, Placed) else Unknown(formula))
        self.touched |= {(name, a) for a in (range(self.weights[name].dim()) if axis is None else (axis,))}

    def add_weight(self, name: str, value: Tensor) -> None:
        """A weight that the captured model did not have (a bias that a fold creates, say)."""
        self.weights[name] = value

    def derived(self, name: str) -> tuple[Derived, ...]:
        """The steps queued for ``name``."""
        return tuple(self._derived.get(name, ()))

    def stored(self, name: str) -> Tensor:
        """The weight as it was captured or written back, where the work is done."""
        tensor = self.weights[name].detach()
        return tensor if self.work is None or tensor.is_meta else tensor.to(self.work)

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the weights that have derived values."""
        return tuple(self._derived)

    def value(self, name: str) -> Tensor:
        """The weight as it stands now, in its stored dtype; derived steps run in float64."""
        steps, address = self.derived(name), self.weights[name].data_ptr()
        if not steps:
            return self.stored(name)
        known = self._values.get(name)
        if known is not None and known[0] == address and known[1] == len(steps):
            return known[2]
        result = _computed(self.stored(name), steps)
        self._values[name] = (address, len(steps), result)
        return result

    def snapshot(self, name: str) -> Callable[[], Tensor]:
        """A function that gives the float64 value of ``name`` as it stands now, whatever is derived from it later."""
        steps = self.derived(name)

        def value() -> Tensor:
            out = self.stored(name).double()
            for step in steps:
                out = step.compute(out)
            return out

        return value

    def constant(self, node: fx.Node, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """The float64 value of a node that is computed from weights alone; ``values`` replaces some of them."""
        if node.op == "get_attr":
            name = str(node.target)
            given = None if values is None else values.get(name)
            return self.stored(name).double() if given is None else given
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.constant(n, values))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs).double()
        return node.target(*args, **kwargs).double()  # type: ignore[operator]

    def forget(self, name: str, value: Tensor | None = None) -> None:
        """Take ``value(name)``, or its copy ``value``, as given from here on (after it was written back)."""
        if name in self._derived:
            self.weights[name] = self.value(name) if value is None else value
            del self._derived[name]
            self._values.pop(name, None)

    def hosted(self, node: fx.Node, what: str) -> bool:
        """Whether the module that ran ``node`` can be swapped for one of ours."""
        return self.hosts is None or node.meta.get("module") in self.hosts.get(what, ())

    def is_quantized(self, fqn: str) -> bool:
        """Whether the statistics of the whole model have a scheme for this weight."""
        return self.statistics is not None and fqn in self.statistics["linears"]

    # -- graph -----------------------------------------------------------------------------------------------------
    def nodes(self, *kinds: str) -> list[fx.Node]:
        """The nodes of these kinds, in order."""
        return [n for n in self.graph.nodes if kind(n) in kinds]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.values())).device if self.weights else torch.device("cpu")

    def users_of(self, fqn: str) -> list[fx.Node]:
        """Every node that reads a weight."""
        return [u for n in self.getters(fqn) for u in n.users]

    def getters(self, fqn: str) -> list[fx.Node]:
        """The nodes that name a weight."""
        return list(self.graph.find_nodes(op="get_attr", target=fqn))

    def counts(self) -> dict[str, int]:
        """How many nodes there are of each kind."""
        counts: dict[str, int] = {}
        for node in self.graph.nodes:
            counts[kind(node)] = counts.get(kind(node), 0) + 1
        return counts

    def constant_node(self, name: str, value: Tensor) -> fx.Node:
        """A ``get_attr`` at the insertion point for a constant that passes add (a Hadamard factor, say)."""
        if name not in self.weights:
            self.weights[name] = value.to(self.device)
        node = self.graph.get_attr(name)
        node.meta.update(shape=tuple(value.shape), dtype=value.dtype)
        return node

    def sketch_as(self, new: fx.Node, old: Any) -> None:
        """``new`` gives what ``old`` gives, in memory of its own, as far as an analysis needs it: shapes and zeros."""
        if old in self.sketches:
            self.sketches[new] = pytree.tree_map_only(Tensor, torch.clone, self.sketches[old])

    def visual_node(self) -> fx.Node:
        """The placeholder that carries the visual mask; made, as the last one, at the first request."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        known = next((n for n in placeholders if n.target == VISUAL), None)
        if known is not None:
            return known
        last = placeholders[-1]
        with self.graph.inserting_after(last):
            self.inputs.append(self.visual)
            return self.graph.placeholder(VISUAL)

    def clean(self) -> None:
        """Remove dead nodes; writes through views are kept."""
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("placeholder", "output") or node.users or mutates(node) or node.is_impure() or KEPT in node.meta:
                continue
            self.graph.erase_node(node)
        self.graph.lint()

    def replay(self, watch: Watch | None = None, values: bool = True) -> list[Any]:
        """Run the graph on the inputs it was captured with; ``watch(node, result, args, kwargs)`` sees every node.

        Values are dropped after their last use.  The recording holds numbers that depend on its inputs, so there is
        deliberately no way to pass others; and values steer what was recorded (which experts ran), so weights have their
        derived values.  Without ``values``, floats are shapes only and integers are those of the recording: enough for
        an analysis, whatever the size of the model.
        """
        env: dict[fx.Node, Any] = {}
        uses = {n: len(n.users) for n in self.graph.nodes}
        inputs = iter(self.inputs)
        outputs: list[Any] = []
        for node in self.graph.nodes:
            args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
            if node.op == "placeholder":
                value = next(inputs)
                result = value if not isinstance(value, Tensor) else (value if values else meta.without_value(value)).clone()
            elif node.op == "get_attr":
                name = str(node.target)
                result = self.value(name) if values else meta.without_value(self.weights[name])
            elif node.op == "output":
                flat = args[0] if isinstance(args[0], tuple | list) else (args[0],)
                outputs = list(flat)
                result = None
            elif READ in node.meta:
                result = None
            elif not values and node in self.sketches:
                result = meta.copied(self.sketches[node])
            else:
                func = getattr(type(args[0]), method_name(node, args)) if node.op == "call_method" else node.target
                result = func(*args, **kwargs) if values else meta.call(func, args, kwargs)
            if watch is not None:
                watch(node, result, list(args), dict(kwargs))
            env[node] = result
            for source in node.all_input_nodes:
                uses[source] -= 1
                if not uses[source]:
                    env.pop(source, None)
        return outputs


def _computed(base: Tensor, steps: Sequence[Derived]) -> Tensor:
    """The steps in float64, slice by slice where they allow it: an embedding never exists in float64 as a whole."""
    groups = [(axis, [step.compute for step in some]) for axis, some in itertools.groupby(steps, lambda step: step.axis)]
    value = base
    for i, (axis, computes) in enumerate(groups):
        dtype = base.dtype if i == len(groups) - 1 else torch.float64
        value = _sliced(value, axis, computes, dtype)
    return value


def _sliced(value: Tensor, axis: int | None, computes: Sequence[Callable[[Tensor], Tensor]], dtype: torch.dtype) -> Tensor:
    def run(part: Tensor) -> Tensor:
        part = part.double()
        for compute in computes:
            part = compute(part)
        return part.to(dtype)

    if axis is None or value.dim() < 2 or value.numel() <= SLICE:
        return run(value)
    across = max((d for d in range(value.dim()) if d != axis), key=lambda d: value.shape[d])
    length = max(1, SLICE * value.shape[across] // value.numel())
    result = torch.empty(value.shape, dtype=dtype, device=value.device)
    for part, out in zip(value.split(length, across), result.split(length, across), strict=True):
        out.copy_(run(part))
    return result


def method_name(node: fx.Node, args: Sequence[Any]) -> str:
    """The tensor method to call: ``reshape`` for ``view``, which minds how passes left its operand in memory."""
    if node.target == "view" and not isinstance(args[1], torch.dtype):
        return "reshape"
    return str(node.target)


def copy_meta(new: fx.Node, old: fx.Node, name: str, site: int) -> None:
    """Give a new node its origin's stack trace and module stack, and say which pass made it."""
    for key in ("stack_trace", "nn_module_stack", "module"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
    new.meta["mmqc"] = (name, site)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype that a node's value had when it was captured, where that is known."""
    example = node.meta.get("example_value")
    return example.dtype if isinstance(example, Tensor) else node.meta.get("dtype")


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor (parameters included)."""
    return isinstance(value, torch.Tensor)
