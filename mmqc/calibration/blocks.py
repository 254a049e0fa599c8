"""Which modules can be calibrated one after the other, and where each gets its arguments: learned from live forwards.

    block i + 1 (stream i, kept)  ->  stream i + 1           stream: tensors that block i returned, handed on untouched
                                                             kept: what else blocks take: masks, positions, other numbers

A list of blocks is a ``ModuleList`` that holds linears to quantize.  Its blocks form segments: where a block takes nothing
that the one before returned (code in between changed it), a new segment begins.  No names are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.calibration.observe import Call, Output, observe
from mmqc.errors import MmqcError

STREAM, KEPT, PLAIN = "stream", "kept", "plain"
_PLAIN = (type(None), bool, str, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Source:
    """Where one leaf of a block's arguments comes from: an index into the stream or the kept values, or the value itself."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Block:
    """A block's module FQN, its arguments as a tree, the source of every leaf, and (leaf, index) of kept values it meets first."""

    name: str
    spec: Any
    sources: tuple[Source, ...]
    meets: tuple[tuple[int, int], ...]


@dataclass
class Segment:
    """Blocks of one list, each of which takes what the one before returned."""

    where: str
    blocks: list[Block] = field(default_factory=list)

    def last_use(self) -> dict[int, int]:
        """The number of the last block that reads each kept value."""
        found = {}
        for i, block in enumerate(self.blocks):
            found.update({s.value: i for s in block.sources if s.kind == KEPT})
        return found


@dataclass(frozen=True)
class Outside:
    """Linears in no segment, by module FQN: they are calibrated by forwards of the whole model.

    ``after`` is how many segments have begun when the last of them is called; None: nobody knows.
    """

    linears: tuple[str, ...]
    after: int | None = None


@dataclass
class Layout:
    """The units of a model in the order in which they run, and why some lists are not taken apart, by list FQN."""

    units: list[Segment | Outside]
    refused: dict[str, str]

    def until(self, outside: Iterable[Outside]) -> str:
        """The block whose call means that all calls of these linears are over; empty if there is none."""
        segments = [u for u in self.units if isinstance(u, Segment)]
        after = [len(segments) if unit.after is None else unit.after for unit in outside]
        return segments[max(after)].blocks[0].name if max(after) < len(segments) else ""


class NotStreamableError(MmqcError, RuntimeError):
    """A list whose blocks are called in a way that cannot be repeated: its FQN and the reason."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


def block_lists(model: nn.Module, linears: Iterable[str]) -> dict[str, list[str]]:
    """The outermost ModuleLists with linears of ``linears`` below their children, and the children, by FQN."""
    found: dict[str, list[str]] = {}
    wanted = list(linears)
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{known}.") for known in found)
        if not isinstance(module, nn.ModuleList) or inside:
            continue
        children = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
        if any(fqn.startswith(f"{child}.") for fqn in wanted for child in children) and not set(wanted) & set(children):
            found[name] = children
    return found


def leaves_of(where: str, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments and their tree.

    Raises:
        NotStreamableError: an argument that cannot be stored and passed again: a cache, say.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, int, float, *_PLAIN)):
            raise NotStreamableError(where, f"its blocks take a {type(leaf).__name__}, which may not be passed twice")
    return leaves, spec


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are the same tensor, or equal values of one type."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return type(a) is type(b) and a == b


class _List:
    """What one forward tells about one list of blocks."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.segments: list[Segment] = []
        self.kept: list[Any] = []
        self.returned: list[tuple[Tensor, int]] = []
        self.refused = ""
        self.called: set[str] = set()

    def enter(self, name: str, args: Any, kwargs: Any) -> None:
        """A block is called; raises NotStreamableError."""
        if name in self.called:
            raise NotStreamableError(self.where, "its blocks are called more than once in one forward")
        self.called.add(name)
        leaves, spec = leaves_of(self.where, args, kwargs)
        streamed = [self._streamed(leaf) for leaf in leaves]
        if not any(s is not None for s in streamed):
            self.segments.append(Segment(self.where))
            self.kept = []
        sources, meets = [], []
        for number, (leaf, stream) in enumerate(zip(leaves, streamed, strict=True)):
            if stream is not None:
                sources.append(Source(STREAM, stream))
            elif isinstance(leaf, _PLAIN):
                sources.append(Source(PLAIN, leaf))
            else:
                known = next((i for i, k in enumerate(self.kept) if same(k, leaf)), None)
                if known is None:
                    known = len(self.kept)
                    self.kept.append(leaf)
                    meets.append((number, known))
                sources.append(Source(KEPT, known))
        self.segments[-1].blocks.append(Block(name, spec, tuple(sources), tuple(meets)))

    def _streamed(self, leaf: Any) -> int | None:
        return next((i for i, (t, v) in enumerate(self.returned) if t is leaf and t._version == v), None)

    def leave(self, output: Any, *call: Any) -> None:
        """A block has returned."""
        self.returned = [(t, t._version) for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]


class Survey:
    """One forward, watched: see ``survey``."""

    def __init__(self, model: nn.Module, lists: Mapping[str, list[str]], linears: Iterable[str]) -> None:
        self.model, self.names = model, lists
        self.lists = {where: _List(where) for where in lists}
        inside = {f"{child}." for children in lists.values() for child in children}
        self.outside = [fqn for fqn in linears if not any(fqn.startswith(i) for i in inside)]
        self.events: list[Any] = []  # segments and names of linears, in the order of their first calls
        self.after: dict[str, int] = {}
        self.begun = 0

    def run(self, call: Callable[[], Any]) -> Survey:
        """Run the forward."""
        places: dict[Call | Output, Any] = {Call(fqn): partial(self._linear, fqn) for fqn in self.outside}
        for where, children in self.names.items():
            for child in children:
                places |= {Call(child): partial(self._enter, where, child), Output(child): self.lists[where].leave}
        try:
            with observe(self.model, places):
                call()
        finally:
            for found in self.lists.values():
                found.kept, found.returned = [], []
        return self

    def _enter(self, where: str, name: str, args: Any, kwargs: Any) -> None:
        found = self.lists[where]
        if found.refused:
            return
        before = len(found.segments)
        try:
            found.enter(name, args, kwargs)
        except NotStreamableError as error:
            found.refused = error.reason
        if len(found.segments) > before:
            self.events.append(found.segments[-1])
            self.begun += 1

    def _linear(self, fqn: str, args: Any, kwargs: Any) -> None:
        self.after[fqn] = self.begun
        if fqn not in self.events:
            self.events.append(fqn)


def survey(
    model: nn.Module, linears: Iterable[str], calls: Iterable[Callable[[], Any]], refused: Mapping[str, str] | None = None
) -> Layout:
    """Run ``calls``, forwards on differing batches, and say how the model can be taken apart.

    Args:
        model: on which hooks are set for the time of the calls.
        linears: module FQNs of the linears that matter.
        calls: forwards of the whole model.
        refused: lists that are not to be taken apart, and why.
    """
    linears, calls, refused = list(linears), list(calls), dict(refused or {})
    lists = {where: c for where, c in block_lists(model, linears).items() if where not in refused}
    seen = [Survey(model, lists, linears).run(call) for call in calls]
    for where in lists:
        found = [s.lists[where] for s in seen]
        reason = next((f.refused for f in found if f.refused), "")
        shapes = [f.segments for f in found if f.segments]
        if not reason and any(shape != shapes[0] for shape in shapes):
            reason = "its blocks are called differently from batch to batch"
        if reason or not shapes:
            refused[where] = reason or "no recorded batch reached it"
    if any(where in refused for where in lists):
        return survey(model, linears, calls, refused)  # their linears have to find their places outside
    return Layout(_units(seen, linears), refused)


def _units(seen: list[Survey], linears: list[str]) -> list[Segment | Outside]:
    """Segments and groups of linears in the order of the fullest forward; what only another one reached comes behind."""
    events: list[Any] = []
    seen = sorted(seen, key=lambda s: -len(s.events))
    for found in seen:
        events += [e for e in found.events if e not in events]
    inside = {b.name for e in events if isinstance(e, Segment) for b in e.blocks}
    known = {e for e in events if isinstance(e, str)}
    events += [fqn for fqn in linears if fqn not in known and not any(fqn.startswith(f"{name}.") for name in inside)]
    units: list[Segment | Outside] = []
    for event in events:
        if isinstance(event, Segment):
            units.append(event)
            continue
        # the number of segments means something in the fullest forward only
        after = seen[0].after.get(event) if all(s.begun in (0, seen[0].begun) for s in seen) else None
        last = units[-1] if units else None
        if isinstance(last, Outside):
            both = None if after is None or last.after is None else max(after, last.after)
            units[-1] = Outside((*last.linears, event), both)
        else:
            units.append(Outside((event,), after))
    return units
