"""Dynamo's graphs as programs, and programs as graph modules for Inductor.

Dynamo hands parameters over as placeholders.  Their values are the model's own tensors, so each is found by identity in
the outermost module on the call stack, which also gives it its name; it becomes a ``get_attr`` as in a recording.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode

from mmqc.graph.kinds import kind
from mmqc.graph.program import KEPT, Program, method_name


@dataclass(frozen=True)
class Captured:
    """A fragment as a program; which of Dynamo's arguments its placeholders are, and which are parameters."""

    program: Program
    arguments: list[int]
    parameters: list[int]


_OPENS_OR_CLOSES = "_vmap_"  # a vmap has no result of its own


def calling_modules() -> Iterator[nn.Module]:
    """The modules whose methods are on the Python stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back  # type: ignore[assignment]


def outermost_module() -> nn.Module | None:
    """The model that is being called: compilation runs inside its call."""
    found = None
    for module in calling_modules():
        found = module
    return None if found is None else unwrapped(found)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that ``torch.compile(model)`` wraps; any other as it is.

    Raises:
        TypeError: it is no module; says what to pass.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.Module):
        return model
    given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    holds = isinstance(getattr(model, "model", None), nn.Module)  # a pipeline, a trainer
    raise TypeError(f"model is {given}, not a torch.nn.Module: pass {'its .model' if holds else 'a model that is loaded'}")


def from_dynamo(gm: fx.GraphModule, example_inputs: Sequence[Any], model: nn.Module) -> Captured:
    """The graph as a program; parameters of ``model`` become ``get_attr`` nodes under their FQNs."""
    named = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(tensor), []).append(name)
    graph, weights, inputs = fx.Graph(), {}, []
    arguments: list[int] = []
    parameters: list[int] = []
    values: dict[fx.Node, Any] = {}
    shared: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    examples = iter(enumerate(example_inputs))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            position, example = next(examples)
            names = named.get(id(example))
            if names:
                shared[node] = _by_user(graph, node, names)
                weights.update((str(new.target), example) for new in shared[node].values())
                parameters.append(position)
            else:
                values[node] = new = graph.placeholder(node.target)
                new.meta.update(node.meta)
                inputs.append(_plain(example))
                arguments.append(position)
        elif node.op == "get_attr":
            name = str(node.target)
            weights[name] = _attribute(gm, name)
            values[node] = graph.get_attr(name)
        else:
            values[node] = graph.node_copy(node, lambda n, user=node: shared[n][user] if n in shared else values[n])
    for node in graph.nodes:
        if not node.users and _OPENS_OR_CLOSES in kind(node):
            node.meta[KEPT] = True
    prog = Program(graph, weights, inputs, fragment=True)
    return Captured(prog, arguments, parameters)


def _by_user(graph: fx.Graph, parameter: fx.Node, names: list[str]) -> dict[fx.Node, fx.Node]:
    """A ``get_attr`` for each user of a parameter, under the name that the user's module has for it.

    A tied tensor is one argument of Dynamo's graph, but the embedding and the head are two weights to the passes.
    """
    made: dict[str, fx.Node] = {}
    found = {}
    for user in parameter.users:
        name = _name_for(user, names)
        if name not in made:
            made[name] = graph.get_attr(name)
            made[name].meta.update(parameter.meta)
        found[user] = made[name]
    return found


def _name_for(user: fx.Node, names: list[str]) -> str:
    """A tensor that several modules share goes by the name of the one that uses it: a linear's, or an embedding's."""
    stack = user.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values()) if len(names) > 1 else []):
        plain = re.sub(r"L\['self'\]\.?|_modules\['([^']*)'\]", r"\1", str(path)).strip(".")
        for name in names:
            owner = name.rpartition(".")[0]
            if plain and (owner == plain or owner.endswith(f".{plain}") or plain.endswith(f".{owner}")):
                return name
    return names[0]


def _plain(example: Any) -> Any:
    if isinstance(example, torch.SymInt):
        return int(example.node.hint)
    return example.detach() if isinstance(example, Tensor) else example


def _attribute(gm: nn.Module, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


def to_graph_module(prog: Program) -> tuple[fx.GraphModule, list[str]]:
    """The program with its weights as further inputs, for Inductor, and their names in order.

    Inputs, not buffers: Dynamo runs one graph for all blocks of a model, each call with another block's parameters.
    """
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in prog.graph.nodes:
        if node.op == "placeholder":
            known[node] = graph.node_copy(node)
    names = list(dict.fromkeys(str(n.target) for n in prog.graph.nodes if n.op == "get_attr"))
    taken = {name: graph.placeholder("w_" + re.sub(r"\W", "_", name)) for name in names}
    for node in prog.graph.nodes:
        if node.op == "get_attr":
            known[node] = taken[str(node.target)]
        elif node.op != "placeholder":
            known[node] = new = graph.node_copy(node, known.__getitem__)
            if node.op == "call_method":  # passes may leave other strides than those that Dynamo saw
                new.target = method_name(node, node.args)
    return fx.GraphModule(nn.Module(), graph), names


def keep_notes(new: fx.GraphModule, dynamos: fx.GraphModule, origins: Sequence[int | None], weights: int = 0) -> None:
    """Give a rewritten graph what Dynamo notes on its own: AOTAutograd learns from it which inputs stay where they are.

    Without it CUDA graphs copy every weight before each replay, and are left out where a cache is written to.

    Args:
        new: the rewritten graph.
        dynamos: the graph that Dynamo made.
        origins: for each placeholder of ``new``, its position among Dynamo's; None for one that a pass made.
        weights: so many of the last placeholders are weights that a pass derived; they stay where they are, too.
    """
    if not hasattr(dynamos, "_param_name_to_source"):
        return
    new.meta.update(dynamos.meta)
    new._param_name_to_source = dynamos._param_name_to_source
    theirs = [n for n in dynamos.graph.nodes if n.op == "placeholder"]
    ours = [n for n in new.graph.nodes if n.op == "placeholder"]
    for i, (node, origin) in enumerate(zip(ours, origins, strict=True)):
        node._dynamo_source = None if origin is None else getattr(theirs[origin], "_dynamo_source", None)  # type: ignore[attr-defined]
        if origin is None and i >= len(ours) - weights:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def static_examples(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Stand-ins for further inputs of a graph that Dynamo is compiling, with sizes that never become dynamic."""
    mode = detect_fake_mode()
    return [mode.from_tensor(t, static_shapes=True) for t in tensors] if mode is not None else list(tensors)
