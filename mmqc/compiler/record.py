"""What the backend did to each graph: quantized or not, which ops, which kernels, what fell back and why.

    with collect_records() as records:
        compiled(**inputs)

Records belong to the thread that compiles: nothing is kept while nobody collects.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GraphRecord:
    """One graph that Dynamo handed to the backend.

    Attributes:
        index: position among the graphs of this collection.
        n_ops: calls in Dynamo's graph.
        how: "eager" (glue without heavy ops), "inductor" (nothing quantized), "mmqc", or "uncompiled": a function that
            needs a value which only data says, and runs as it is; what it calls is compiled by itself.
        quantized: whether the graph holds mmqc ops.
        ops: mmqc ops by name.
        kernels: kernels that the generated code calls, in order, forward then (if compiled) backward.
        fallbacks: (op, reason) where the plain kernel could not be used.
        passes: records of the passes that rewrote the graph, where the backend quantized it.
        compile_seconds: time in Inductor.
        where: the function that was traced, with its file and line.
    """

    index: int
    n_ops: int
    how: str
    quantized: bool = False
    ops: Counter[str] = field(default_factory=Counter)
    kernels: list[str] = field(default_factory=list)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    passes: list[Any] = field(default_factory=list)
    compile_seconds: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        ops = ", ".join(f"{n} {name}" for name, n in sorted(self.ops.items())) or "none"
        lines = [f"graph {self.index}: {self.n_ops} calls, {self.how}, {self.compile_seconds:.1f} s, mmqc ops: {ops}"]
        if self.where:
            lines.append(f"  of {self.where}")
        lines += [f"  {n:4d} x {name}" for name, n in Counter(self.kernels).items()]
        lines += [f"  fallback {op}: {reason}" for op, reason in self.fallbacks]
        return "\n".join(lines)


class _Collectors(threading.local):
    def __init__(self) -> None:
        self.active: list[list[GraphRecord]] = []


_collectors = _Collectors()


@contextmanager
def collect_records() -> Iterator[list[GraphRecord]]:
    """The records of every graph that this thread compiles inside the ``with``; collections nest."""
    records: list[GraphRecord] = []
    _collectors.active.append(records)
    try:
        yield records
    finally:
        # By identity: two empty collections are equal.
        _collectors.active = [r for r in _collectors.active if r is not records]


def collecting() -> bool:
    """Whether somebody in this thread wants records."""
    return bool(_collectors.active)


def add(record: GraphRecord) -> None:
    """Give the record to every active collection of this thread; the innermost numbers it."""
    if _collectors.active:
        record.index = len(_collectors.active[-1])
    for records in _collectors.active:
        records.append(record)
