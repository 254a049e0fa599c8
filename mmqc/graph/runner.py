"""Run passes over a program: check what each needs, match everything, rewrite everything, clean up, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

from .program import Miss, PassRecord, Program
from .text import program_text

log = logging.getLogger(__name__)


class Pass(Protocol):
    """One rewrite: see CONTRIBUTING.md for the contract."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    gives: ClassVar[frozenset[str]]
    exact: ClassVar[bool]

    def match(self, prog: Program) -> Iterator[Any]:
        """Yield a site or a ``Miss`` for every place looked at; never edit."""
        ...

    def rewrite(self, prog: Program, site: Any) -> None:
        """Rewrite one site; may not refuse, may not search."""
        ...


class PassError(RuntimeError):
    """A pass could not run: names the pass, the fact that fails and who refused earlier."""


Facts = Mapping[str, Callable[[Program], list[str]]]


def run(prog: Program, passes: Iterable[Pass], facts: Facts, *, text: bool = False) -> Program:
    """Run ``passes`` in order; with ``text`` each record also holds the program before and after."""
    for item in passes:
        _check(prog, item, item.needs, facts, "needs")
        start = time.perf_counter()
        record = PassRecord(item.name, item.exact, before=program_text(prog) if text else "")
        counts = prog.counts()
        found = list(item.match(prog))
        record.misses = [f for f in found if isinstance(f, Miss)]
        for site in found:
            if not isinstance(site, Miss):
                item.rewrite(prog, site)
                record.sites.append(str(site))
        prog.clean()
        after = prog.counts()
        record.delta = {
            k: after.get(k, 0) - counts.get(k, 0)
            for k in counts.keys() | after.keys()
            if after.get(k, 0) != counts.get(k, 0)
        }
        record.ms = (time.perf_counter() - start) * 1e3
        record.after = program_text(prog) if text else ""
        prog.records.append(record)
        log.info("%s", record)
        _check(prog, item, item.gives, facts, "gives")
    return prog


def _check(prog: Program, item: Pass, names: frozenset[str], facts: Facts, word: str) -> None:
    for name in sorted(names):
        wrong = facts[name](prog)
        if wrong:
            refused = [f"{r.name}: {m}" for r in prog.records for m in r.misses][:5]
            earlier = f"; refused earlier by {refused}" if refused else ""
            raise PassError(f"pass {item.name!r} {word} {name!r}, which fails at {wrong[:5]}{earlier}")
