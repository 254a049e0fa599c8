"""All that reads a weight: it may be changed only if every use of it changes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.linear import bias_of, operands, weight_of
from mmqc.graph.program import Program
from mmqc.graph.spaces.coordinates import MOVES, SAME, Coordinates, weights_behind
from mmqc.graph.spaces.space import Space, Touch

WEIGHT = "weight"
RESCALED = "an embedding with max_norm rescales it whenever it is read"


def pin_other_uses(prog: Program, found: Coordinates, spaces: list[Space]) -> None:
    """Pin every space one of whose weights, or their biases, something reads that would not follow."""
    getters: dict[str, list[fx.Node]] = {}
    for node in prog.nodes("get_attr"):
        getters.setdefault(str(node.target), []).append(node)
    uses = {name: [use for n in nodes for use in _uses(n, found)] for name, nodes in getters.items()}
    moving = rescaled(prog)
    columns = {(r.node, r.axis): r.ids for r in found.readers}
    for space in spaces:
        for touch in space.touches:
            places = uses.get(touch.fqn, [])
            for node in [*_strays(prog, touch.fqn, places, uses), *_other_columns(touch, places, columns, found.idle)]:
                space.pins.append((node, f"it uses {touch.fqn} in another way"))
            if touch.fqn in moving:
                space.pins.append((touch.node, RESCALED))
            if touch.fqn in prog.unsure:
                space.pins.append((touch.node, prog.unsure[touch.fqn]))


def rescaled(prog: Program) -> set[str]:
    """Weights that reading changes, by all their names."""
    found: set[str] = set()
    for node in prog.nodes("embedding"):
        weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
        limit = node.kwargs.get("max_norm", node.args[3] if len(node.args) > 3 else None)
        if limit is not None and isinstance(weight, fx.Node):
            found |= {str(weight.target), *prog.tied.get(str(weight.target), ())}
    return found


def _strays(
    prog: Program, fqn: str, places: list[tuple[fx.Node, str]], uses: dict[str, list[tuple[fx.Node, str]]]
) -> Iterator[fx.Node]:
    first = places[0][1] if places else ""
    yield from (node for node, way in places if way != first or way in ("bias", "other"))
    if not first.startswith(WEIGHT):
        return
    for node, _ in places:
        bias = bias_of(prog, node)
        if bias != bias_of(prog, places[0][0]):
            yield node
        yield from (u for u, way in uses.get(bias, ()) if way != "bias" or weight_of(u) != fqn)


def _other_columns(
    touch: Touch, places: list[tuple[fx.Node, str]], columns: Mapping[tuple[fx.Node, int], Tensor | None], idle: set[fx.Node]
) -> list[fx.Node]:
    """Linears that read something else with the same columns."""
    if touch.role != "reader":
        return []
    there = ((node, columns.get((node, touch.axis))) for node, _ in places if node not in idle)
    return [node for node, ids in there if ids is None or bool((ids[touch.groups] < 0).any())]


def _uses(getter: fx.Node, found: Coordinates) -> Iterator[tuple[fx.Node, str]]:
    """Every node that takes a weight, through transposes and the choice of an expert, and the way in which it does."""
    ways = {n for c in found.contractions.values() for n in c.chain}
    todo = [getter]
    while todo:
        node = todo.pop()
        for user in node.users:
            use = found.contractions.get(user)
            if use is not None and use.chain[-1] is node and list(user.all_input_nodes).count(node) == 1:
                yield user, f"{WEIGHT} {kind(user)} {use.reads} {use.writes}" if use.x is not node else "other"
            elif user in ways:
                todo.append(user)
            else:
                yield user, _way(user, node, found) if node is getter else "other"


def _way(user: fx.Node, getter: fx.Node, found: Coordinates) -> str:
    word = kind(user)
    if word in ("linear", "conv", "embedding"):
        roles = [role for role, node in operands(user).items() if node is getter]
        return {"weight": word, "bias": "bias"}.get(roles[0], "other") if len(roles) == 1 else "other"
    followed = (word in ("add", "sub") or word in MOVES | SAME) and found.shadows.get(user) is not None
    return "data" if followed else "other"


def only_in(prog: Program, name: str, wanted: set[fx.Node]) -> bool:
    """Whether a weight, casts and sums with other weights included, goes nowhere but into ``wanted``."""
    todo = prog.getters(name)
    while todo:
        for user in todo.pop().users:
            if user in wanted:
                continue
            if not weights_behind(user):
                return False
            todo.append(user)
    return True
