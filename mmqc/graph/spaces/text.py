"""Channel spaces as text for people: each with all that writes, reads, norms and pins it; layers that repeat in one entry.

Two spaces share an entry if their texts differ in nothing but the numbers in names.  The numbers that vary are written as
sets: ``layers.{0..27}.mlp.up.weight``; names of graph nodes, which are numbered through, get a star: ``silu*``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from mmqc.graph.spaces.space import Space

_NUMBER = re.compile(r"\d+")
_NODE = re.compile(r"^(\w+?)(_\d+)?(?= in |$)")
_PINS = 4  # a space that is pinned in more ways is pinned just as well


@dataclass(frozen=True)
class Line:
    """One or several things that are said of a space: what about it, who, and the rest."""

    label: str
    names: tuple[str, ...]
    rest: str = ""
    is_node: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for lines that may be written as one."""
        name = _starred(self.names[0]) if self.is_node else self.names[0]
        return self.label, _NUMBER.sub("#", name), self.rest

    def __str__(self) -> str:
        between = "" if not self.rest else ": " if self.is_node else "  "
        return f"    {self.label:10s}  {_merged(self.names, self.is_node)}{between}{self.rest}"


def spaces_text(spaces: Iterable[Space], status: Callable[[Space], str]) -> str:
    """All spaces in order; ``status`` says what becomes of one."""
    entries: dict[object, list[list[Line]]] = {}
    for space in spaces:
        lines = list(_folded(_lines(space)))
        heading = space.width, _state(space), status(space)
        key = heading, tuple((line.key, len(line.names)) for line in lines)
        entries.setdefault(key, []).append(lines)
    return "\n\n".join(_entry(key[0], members) for key, members in entries.items())  # type: ignore[index]


def _entry(heading: tuple[int, str, str], members: list[list[Line]]) -> str:
    width, state, status = heading
    head = f"space of {width}" if len(members) == 1 else f"{len(members)} spaces of {width}"
    lines = [_together(lines) for lines in zip(*members, strict=True)]
    return "\n".join([f"{head}: {state}, {status}", *map(str, lines)])


def _state(space: Space) -> str:
    if space.pins or space.mean_pins:
        return "pinned"
    if space.made:
        return "written by an operation"
    return "at the edge of the graph" if space.inputs or space.outputs else "free"


def _lines(space: Space) -> Iterator[Line]:
    """All that is known of one space; pins in the order of their text, so that layers compare equal."""
    yield from (Line("written by", (n.name,), "a graph input", True) for n in space.inputs)
    for source in space.made:
        gain = source.what == "gain" and source.fqn
        yield Line("made by", (source.fqn,), "a gain") if gain else Line("made by", (_place(source.node),), "", True)
    for label, touches in (("written by", space.writers), ("read by", space.readers)):
        for touch in touches:
            copies, n = touch.groups.shape
            yield Line(label, (touch.fqn,), f"axis {touch.axis}, {copies} x {n}")
    yield from (Line("read by", (f"output {i}",)) for i in space.outputs)
    for norm in (*space.norms, *space.mean_pins):
        module = str(norm.meta.get("module") or "")
        rest = "subtracts a mean" if norm in space.mean_pins else ""
        yield Line("norm", (module or norm.name,), rest, not module)
    pins = sorted({Line("pinned by", (_place(node),), reason, True) for node, reason in space.pins}, key=_pin_order)
    known = list(dict.fromkeys(pin.key for pin in pins))
    yield from (pin for pin in pins if pin.key in known[:_PINS])
    if len(known) > _PINS:
        yield Line("", (f"and {len(known) - _PINS} more",))


def _pin_order(line: Line) -> tuple[object, ...]:
    return line.key, [int(n) for n in _NUMBER.findall(line.names[0])]


def _place(node: fx.Node) -> str:
    """A node and the module that ran it."""
    module = node.meta.get("module")
    return f"{node.name} in {module}" if module else node.name


def _folded(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines that say the same of several things, as one."""
    groups: dict[object, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.key, []).append(line)
    return map(_together, groups.values())


def _together(lines: Iterable[Line]) -> Line:
    first, *more = lines
    names = dict.fromkeys((*first.names, *(name for line in more for name in line.names)))
    return Line(first.label, tuple(names), first.rest, first.is_node)


def _starred(name: str) -> str:
    return _NODE.sub(r"\1*", name)


def _merged(names: tuple[str, ...], are_nodes: bool) -> str:
    """Names that differ in their numbers only, as one."""
    if len(names) == 1:
        return names[0]
    names = tuple(dict.fromkeys(map(_starred, names))) if are_nodes else names
    columns = list(zip(*([int(n) for n in _NUMBER.findall(name)] for name in names), strict=True))
    sets = [sorted(set(column)) for column in columns]
    parts = iter(map(_set_text, sets))
    text = _NUMBER.sub(lambda _: next(parts), names[0])
    every = 1
    for values in sets:
        every *= len(values)
    return text if every == len(names) else f"{text} ({len(names)} of them)"


def _set_text(values: list[int]) -> str:
    """E.g. 3, {0..27}, {5,11..23}, {1,2,7}."""
    steps = {b - a for a, b in itertools.pairwise(values)}
    if len(values) == 1:
        return str(values[0])
    if len(values) > 2 and len(steps) == 1:
        return f"{{{values[0]}..{values[-1]}}}" if steps == {1} else f"{{{values[0]},{values[1]}..{values[-1]}}}"
    shown = ",".join(map(str, values if len(values) <= 8 else values[:7]))
    return f"{{{shown}}}" if len(values) <= 8 else f"{{{shown},...,{values[-1]}}}"
