"""Give every linear its scheme, by its place in the graph.

Needs:   ops.raised
Gives:   nothing in the graph: sets ``tower``, ``role`` and ``scheme`` in the meta of linear nodes
Exact:   yes, it changes no computation
Refuses: the output head and whatever else ``keep`` names; a linear whose weight is computed, or used by other operations;
         a linear that is no ``nn.Linear`` module (it could not be swapped).  A tower without a scheme has no sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import fx

from ..config import QuantConfig, Scheme
from ..graph.kinds import kind
from ..graph.linear import contraction, weight_of
from ..graph.program import Miss, Program
from ..graph.spaces import Spaces
from ..graph.towers import roles, towers

HEAD = "lm_head"


def kept(pattern: str, fqn: str, role: str) -> bool:
    """Whether a ``keep`` pattern means this module; ``lm_head`` means the output head whatever it is called."""
    if pattern == HEAD and role == "head":
        return True
    return any(fnmatchcase(fqn, p) for p in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"))


@dataclass(frozen=True)
class Site:
    """One linear node and what it gets."""

    node: fx.Node
    fqn: str
    tower: str
    role: str
    scheme: Scheme

    def __str__(self) -> str:
        return f"{self.fqn}: {self.tower} {self.role} {self.scheme}"


@dataclass(frozen=True)
class AssignScheme:
    """See the module's docstring."""

    config: QuantConfig
    name: ClassVar[str] = "assign_scheme"
    needs: ClassVar[frozenset[str]] = frozenset({"ops.raised"})
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every linear node."""
        place, role = self.places(prog)
        for node in prog.nodes("linear"):
            fqn = weight_of(node)
            module = fqn.removesuffix(".weight")
            scheme = self.config.scheme(place.get(node, "language"))
            pattern = next((p for p in self.config.keep if kept(p, module, role.get(node, ""))), None)
            if not fqn:
                stacked = contraction(prog, node)
                reason = "its weight is computed" if stacked is None else "its weight is one of several in a parameter"
                yield Miss(node.name, reason, node.meta.get("module", "") if stacked is None else stacked.fqn)
            elif pattern is not None:
                yield Miss(node.name, f"kept in floating point ({pattern})", module)
            elif scheme is None:
                continue
            elif not prog.hosted(node, "linear") or (prog.hosts is not None and node.meta.get("module") != module):
                yield Miss(node.name, "it is no nn.Linear module of its own, so it cannot be swapped", module)
            elif any(kind(u) != "linear" or weight_of(u) != fqn for u in prog.users_of(fqn)):
                yield Miss(node.name, "another operation reads its weight", module)
            else:
                yield Site(node, fqn, place[node], role.get(node, "inner"), scheme)

    def places(self, prog: Program) -> tuple[dict[fx.Node, str], dict[fx.Node, str]]:
        """Towers and roles: of the whole model where it was recorded, else as the recording's statistics say."""
        if prog.statistics is not None and prog.fragment:
            known = prog.statistics["linears"]
            found = {n: known[f] for n in prog.nodes("linear") if (f := weight_of(n)) in known}
            return {n: e["tower"] for n, e in found.items()}, {n: e["role"] for n, e in found.items()}
        spaces = Spaces.of(prog)
        return towers(prog, spaces), roles(prog, spaces)

    def rewrite(self, prog: Program, site: Site) -> None:
        """Note it on the node."""
        site.node.meta.update(tower=site.tower, role=site.role, scheme=site.scheme)
