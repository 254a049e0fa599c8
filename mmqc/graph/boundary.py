"""Explicit rotations where a rotated space crosses the edge of a fragment.

A model that Dynamo breaks into several graphs hands activations from one to the next in their original basis.  Inside,
a fragment works in the rotated basis: inputs are rotated as they come in, outputs are rotated back as they go out.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .program import Program, copy_meta
from .spaces import Space, Spaces


class BoundaryError(RuntimeError):
    """A space crosses the boundary in a layout that no rotation of the last axis can undo."""


def _layout(ids: Tensor, spaces: Spaces, space: Space, where: str) -> bool:
    """Whether the last axis of a tensor consists of whole, ordered copies of the space; False where it is not on it."""
    place = torch.full((int(spaces.classes.max()) + 1,), -1, dtype=torch.long)
    place[space.classes] = torch.arange(space.width)
    at = torch.where(ids >= 0, place[spaces.classes[ids.clamp(min=0).long()]], -1)
    if not (at >= 0).any():
        return False
    rows = at.reshape(-1, at.shape[-1])
    on = (rows >= 0).any(-1)
    expected = torch.arange(space.width).repeat(at.shape[-1] // space.width)
    if at.shape[-1] % space.width or not torch.equal(rows[on], expected.expand(int(on.sum()), -1)):
        raise BoundaryError(f"{where}: the rotated space of {space.width} channels is not laid out along the last axis")
    if not bool(on.all()):
        raise BoundaryError(f"{where}: only some rows lie on the rotated space of {space.width} channels")
    return True


def _rotate(prog: Program, x: fx.Node, ids: Tensor, space: Space, factors: list[Tensor], signs: Tensor, inverse: bool) -> fx.Node:
    n = space.width
    nodes = [prog.constant_node(f"rotation_{n}_{i}", f.float()) for i, f in enumerate(factors)]
    sign = prog.constant_node(f"rotation_{n}_signs", signs.float())
    copies = ids.shape[-1] // n
    y = x if copies == 1 else prog.graph.call_method("unflatten", (x, -1, (copies, n)))
    y = prog.graph.call_function(torch.ops.mmqc.rotate.default, (y, nodes, sign, inverse))
    copy_meta(y, x, "fuse_rotation", 0)
    return y if copies == 1 else prog.graph.call_method("flatten", (y, -2))


def rotate_inputs(prog: Program, spaces: Spaces, space: Space, factors: list[Tensor], signs: Tensor) -> None:
    """x -> x R behind every placeholder that lies on the space."""
    for node in list(dict.fromkeys(space.inputs)):
        ids = spaces.found.shadows[node]
        if not _layout(ids, spaces, space, node.name):
            continue
        users = list(node.users)
        last = [n for n in prog.graph.nodes if n.op in ("placeholder", "get_attr")][-1]
        with prog.graph.inserting_after(last):
            marker = prog.graph.call_function(_marker)
        with prog.graph.inserting_before(marker):
            new = _rotate(prog, node, ids, space, factors, signs, inverse=False)
        prog.graph.erase_node(marker)
        for user in users:
            user.replace_input_with(node, new)


def rotate_outputs(prog: Program, spaces: Spaces, space: Space, factors: list[Tensor], signs: Tensor) -> None:
    """x R -> x in front of every output that lies on the space."""
    output = next(n for n in prog.graph.nodes if n.op == "output")
    values = list(output.args[0])  # type: ignore[arg-type]
    for i, ids in enumerate(spaces.found.outputs):
        if isinstance(ids, Tensor) and _layout(ids, spaces, space, f"output {i}"):
            with prog.graph.inserting_before(output):
                values[i] = _rotate(prog, values[i], ids, space, factors, signs, inverse=True)
    output.args = (type(output.args[0])(values),)


def _marker() -> None:
    """Where to insert; never runs."""
