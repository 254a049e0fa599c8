"""In which modules' forwards a channel space can be seen: where a module that was not recorded might read or write it.

It is seen where an operation works on it, in the module that is given it or gives it back, in whoever called that module,
and in all that lies between two such modules up to the first that holds both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import LOOKS, READ, Program
from mmqc.graph.spaces.coordinates import FRESH_ZEROS, SHAPE_ONLY, compact, distinct, leaves
from mmqc.graph.spaces.factors import owners
from mmqc.graph.spaces.spaces import Spaces

Axes = frozenset[tuple[str, int]]

LIKE = frozenset(("expand_as", "view", "reshape_as", "type_as"))  # of what follows the first operand: a shape, or a dtype


def seen_from(prog: Program, frames: Set[str]) -> dict[str, Axes]:
    """For each module of ``frames`` ("" is the model) the axes of weights on which the spaces lie that are seen there.

    ``prog`` is a recording that no pass has changed yet.
    """
    found: dict[str, set[tuple[str, int]]] = {frame: set() for frame in frames}
    if not frames:
        return {}
    spaces = Spaces.of(prog, through_norms=False)
    for space, modules in zip(spaces, _modules(prog, spaces), strict=True):
        axes = {(t.fqn, t.axis) for t in space.touches} | {(gain, 0) for gain in space.gains}
        axes |= {(str(w.target), 0) for made in space.made for w in made.node.all_input_nodes if w.op == "get_attr"}  # a norm's
        for frame in _between(modules) & frames:
            found[frame] |= axes
    return {frame: frozenset(axes) for frame, axes in found.items()}


def deciding(prog: Program) -> set[str]:
    """The modules in whose forward Python takes values of activations and may go another way by them; hooks go no other way.

    Integers are left out: tokens that a router sends to an expert are analysed for every choice.
    """
    looks = (node for node in prog.graph.nodes if node.meta.get(READ) == LOOKS)
    return {node.meta["module"] for node in looks if any(map(_is_number, node.all_input_nodes))}


def _is_number(node: fx.Node) -> bool:
    """A number that was computed from activations, or what was found by comparing such; sizes in a fraction are none."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        node = todo.pop()
        dtype = node.meta.get("dtype")
        whole = node.op.startswith("call") and dtype is not None and not (dtype.is_floating_point or dtype is torch.bool)
        if node in seen or whole:
            continue
        seen.add(node)
        if node.op == "get_attr" or (node.op == "placeholder" and dtype is not None and dtype.is_floating_point):
            return True
        todo += _read(node)
    return False


def _read(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node but for those that say no more than a shape and a dtype."""
    word = kind(node)
    if word in SHAPE_ONLY | FRESH_ZEROS:
        return []
    return [n for n in node.all_input_nodes if n is node.args[0]] if word in LIKE and node.args else node.all_input_nodes


def _modules(prog: Program, spaces: Spaces) -> list[set[str]]:
    """The modules in which operations work on each space, their callers, and those to which it is handed."""
    handed: dict[fx.Node, set[str]] = {}
    for name, nodes in prog.handed.items():
        for node in nodes:
            handed.setdefault(node, set()).add(name)
    owner, seen = owners(spaces), [_callers(*(t.node for t in space.touches)) for space in spaces]
    for node, shadow in spaces.found.shadows.items():
        for ids in leaves(shadow):
            for number in _numbers(spaces, owner, ids):
                seen[number] |= _callers(node) | handed.get(node, set())
    return seen


def _callers(*nodes: fx.Node) -> set[str]:
    return {node.meta[key] for node in nodes for key in ("module", "caller") if key in node.meta}


def _numbers(spaces: Spaces, owner: Tensor, ids: Tensor) -> list[int]:
    few = compact(ids)[0]
    known = few[few >= 0].long()
    return distinct(owner[spaces.classes[known]]).tolist() if known.numel() else []


def _between(modules: Iterable[str]) -> set[str]:
    """These modules and what holds them, up to what holds them all."""
    paths = [tuple(filter(None, name.split("."))) for name in modules]
    alike = (len(set(parts)) == 1 for parts in zip(*paths, strict=False))
    common = sum(itertools.takewhile(bool, alike))
    return {".".join(path[:length]) for path in paths for length in range(common, len(path) + 1)}
