"""Run passes over a program: check what each needs, match everything, rewrite everything, clean up, record."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mmqc.errors import MmqcError
from mmqc.graph.program import Miss, PassRecord, Program
from mmqc.graph.text import program_text

if TYPE_CHECKING:
    from mmqc.graph.trace import Trace

log = logging.getLogger(__name__)


class Pass(Protocol):
    """One rewrite, the base of all passes: a frozen dataclass in a file of its own (docs/howto/write_a_pass.md).

    Attributes:
        name: the file's stem.
        needs, gives: facts that hold before it and after it; the runner looks.
        exact: whether the model's function stays what it was.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Any]:
        """Yield a site or a ``Miss`` for every place looked at; never edit."""
        ...

    def rewrite(self, prog: Program, site: Any) -> None:
        """Rewrite one site; may not refuse, may not search."""
        ...


class PassError(MmqcError, RuntimeError):
    """A pass could not run: names the pass, the fact that fails and who refused earlier."""


Facts = Mapping[str, Callable[[Program], list[str]]]


def check_trace() -> bool:
    """Whether MMQC_TRACE asks for a trace of every pass; raises a TraceError where its folder cannot be written."""
    if not os.environ.get("MMQC_TRACE"):
        return False
    from mmqc.graph.trace import trace_folder  # nobody else pays for it

    trace_folder()
    return True


def _begin_trace(prog: Program, item: Pass) -> Trace | None:
    if not check_trace():
        return None
    from mmqc.graph.trace import Trace

    return Trace(prog, type(item).__module__)


def run(prog: Program, passes: Iterable[Pass], facts: Facts, *, text: bool = False) -> Program:
    """Run ``passes`` in order; with ``text`` each record also holds the program before and after."""
    for item in passes:
        steps = Steps(prog, item, facts, text=text)
        steps.rewrite()
        steps.finish()
    return prog


class Steps:
    """One pass, whose sites may be rewritten in parts; ``sites`` are those that are left."""

    def __init__(self, prog: Program, item: Pass, facts: Facts, *, text: bool = False) -> None:
        _check(prog, item, item.needs, facts, "needs")
        start = time.perf_counter()
        self.prog, self.item, self.facts, self.text = prog, item, facts, text
        self.record = PassRecord(item.name, item.exact, before=program_text(prog) if text else "")
        self.counts, self.trace = prog.counts(), _begin_trace(prog, item)
        found = list(item.match(prog))
        self.record.misses = [f for f in found if isinstance(f, Miss)]
        self.sites = dict(enumerate(f for f in found if not isinstance(f, Miss)))
        self.done: dict[int, str] = {}
        self.seconds = time.perf_counter() - start

    def rewrite(self, wanted: Callable[[Any], bool] = lambda site: True) -> None:
        """Rewrite the sites that ``wanted`` holds for."""
        start = time.perf_counter()
        for number in [n for n, site in self.sites.items() if wanted(site)]:
            site = self.sites.pop(number)
            self.item.rewrite(self.prog, site)
            self.done[number] = str(site)
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Clean up, record, check what the pass gives."""
        start = time.perf_counter()
        self.prog.clean()
        after, counts = self.prog.counts(), self.counts
        self.record.sites = [self.done[number] for number in sorted(self.done)]
        self.record.delta = {
            k: after.get(k, 0) - counts.get(k, 0) for k in counts.keys() | after.keys() if after.get(k, 0) != counts.get(k, 0)
        }
        self.record.ms = (self.seconds + time.perf_counter() - start) * 1e3
        self.record.after = program_text(self.prog) if self.text else ""
        self.prog.records.append(self.record)
        if self.trace is not None:
            self.trace.write(self.record)
        log.info("%s", self.record)
        _check(self.prog, self.item, self.item.gives, self.facts, "gives")


def _check(prog: Program, item: Pass, names: frozenset[str], facts: Facts, word: str) -> None:
    for name in sorted(names):
        wrong = facts[name](prog)
        if wrong:
            refused = [f"{r.name}: {m}" for r in prog.records for m in r.misses][:5]
            earlier = f"; refused earlier by {refused}" if refused else ""
            raise PassError(f"pass {item.name!r} {word} {name!r}, which fails at {wrong[:5]}{earlier}")
