"""Where a channel space crosses the edge of a fragment, and explicit ops for its changes of basis there.

A model that Dynamo breaks into several graphs hands activations from one to the next in their original basis.  Inside,
a fragment works in the plan's basis: what comes in is changed as it enters, what goes out is changed back.  An
operation that pins the space (a gain whose readers are in another graph) is an edge of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mmqc.errors import MmqcError
from mmqc.graph.kinds import mutates
from mmqc.graph.program import Program, copy_meta
from mmqc.graph.spaces.space import Space
from mmqc.graph.spaces.spaces import Spaces

Change = Callable[[fx.Node, int], fx.Node]


class BoundaryError(MmqcError, ValueError):
    """Spaces lie on an edge in a layout that no operation on the last axis can change; ``spaces`` are those on it."""

    def __init__(self, reason: str, spaces: list[Space]) -> None:
        super().__init__(reason)
        self.spaces = spaces


@dataclass
class Crossings:
    """Edges on which spaces of one width lie, each with the number of copies along the last axis.

    Attributes:
        inputs: nodes that bring it in: placeholders, and operations whose result is no weight's.
        outputs: positions among the graph's outputs.
        pins: (operation that no rotation passes, its operand).
    """

    inputs: list[tuple[fx.Node, int]] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)
    pins: list[tuple[fx.Node, fx.Node, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many explicit ops a change of basis needs."""
        return len(self.inputs) + len(self.outputs) + len(self.pins)


def crossings(spaces: Spaces, group: list[Space]) -> Crossings:
    """All edges of spaces that have one width and undergo the same change (the value heads of an attention, say).

    Raises:
        BoundaryError: on some edge the last axis does not consist of whole, ordered copies of these spaces, or the tensor
            there is written in place.
    """
    found, seats, in_place = Crossings(), _Seats(spaces, group), spaces.written
    for node in dict.fromkeys(n for s in group for n in [*s.inputs, *(n for m in s.made for n in spaces.made_by(m))]):
        copies = seats.copies(spaces.found.shadows[node], node.name)
        if copies and node in in_place:
            raise BoundaryError(f"{node.name} is written in place, which whoever else holds it has to see", group)
        if copies:
            found.inputs.append((node, copies))
    for i, ids in enumerate(spaces.found.outputs):
        copies = seats.copies(ids, f"output {i}") if isinstance(ids, Tensor) else 0
        if copies:
            found.outputs.append((i, copies))
    for node in dict.fromkeys(n for s in group for n, _ in s.pins):
        for operand in node.all_input_nodes:
            ids = spaces.found.shadows.get(operand)
            copies = seats.copies(ids, f"{operand.name} into {node.name}") if isinstance(ids, Tensor) else 0
            if copies and mutates(node) and operand is node.args[0]:
                raise BoundaryError(f"{node.name} writes to {operand.name} in place", group)
            if copies:
                found.pins.append((node, operand, copies))
    return found


class _Seats:
    """Which space, and which place in it, every coordinate class has."""

    def __init__(self, spaces: Spaces, group: list[Space]) -> None:
        self.classes, self.group, self.width = spaces.classes, group, group[0].width
        count = int(spaces.classes.max()) + 1
        self.place = torch.full((count,), -1, dtype=torch.long)
        self.owner = torch.full((count,), -1, dtype=torch.long)
        for i, space in enumerate(group):
            self.place[space.classes] = torch.arange(space.width)
            self.owner[space.classes] = i

    def copies(self, ids: Tensor, where: str) -> int:
        """How many copies lie side by side on the last axis; 0 where no space of the group is there."""
        known = self.classes[ids.clamp(min=0).long()]
        place, owner = (torch.where(ids >= 0, table[known], -1) for table in (self.place, self.owner))
        if not (owner >= 0).any():
            return 0
        copies, rest = divmod(ids.shape[-1], self.width)
        ordered = not rest and torch.equal(place, torch.arange(self.width).repeat(copies).expand(place.shape))
        if not ordered or not bool((owner.unflatten(-1, (copies, self.width)).diff(dim=-1) == 0).all()):
            met = [self.group[i] for i in owner[owner >= 0].unique().tolist()]
            raise BoundaryError(f"at {where} the {self.width} channels are not laid out along the last axis", met)
        return copies


def change_inputs(prog: Program, edges: list[tuple[fx.Node, int]], change: Change) -> None:
    """Every use of these nodes reads ``change(node, copies)`` instead."""
    body = next(n for n in prog.graph.nodes if n.op not in ("placeholder", "get_attr"))
    for node, copies in edges:
        users = list(node.users)
        with prog.graph.inserting_before(body if node.op == "placeholder" else node.next):
            new = change(node, copies)
        for user in users:
            user.replace_input_with(node, new)


def change_outputs(prog: Program, found: Crossings, change: Change) -> None:
    """Outputs and pinning operations read ``change(value, copies)`` instead."""
    output = next(n for n in prog.graph.nodes if n.op == "output")
    values = list(output.args[0])  # type: ignore[arg-type]
    for i, copies in found.outputs:
        with prog.graph.inserting_before(output):
            values[i] = change(values[i], copies)  # type: ignore[arg-type]
    output.args = (type(output.args[0])(values),)  # type: ignore[call-arg, misc]
    for node, operand, copies in found.pins:
        with prog.graph.inserting_before(node):
            node.replace_input_with(operand, change(operand, copies))


def by_copy(prog: Program, x: fx.Node, copies: int, width: int, body: Callable[[fx.Node], fx.Node], name: str) -> fx.Node:
    """``body`` applied to each copy of a space on the last axis of x."""
    y = x if copies == 1 else prog.graph.call_method("unflatten", (x, -1, (copies, width)))
    y = body(y)
    copy_meta(y, x, name, 0)
    return y if copies == 1 else prog.graph.call_method("flatten", (y, -2))
