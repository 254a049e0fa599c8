"""Give every linear its scheme, by its place in the graph.

Needs:   ops.raised
Gives:   nothing in the graph: sets ``tower``, ``role`` and ``scheme`` in the meta of linear nodes
Exact:   yes, it changes no computation
Clips:   where the solver is AWQ's clip, linears of queries and keys are rounded to nearest (``WeightSpec.clip_scores``)
Refuses: the output head and whatever else ``keep`` names; a linear whose weight is computed, or used by other operations;
         a linear that is no ``nn.Linear`` module (it could not be swapped).  A tower without a scheme has no sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import fx

from mmqc.config import HEAD, QuantConfig, Scheme
from mmqc.graph.kinds import kind
from mmqc.graph.linear import contraction, weight_of
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.graph.scores import score_weights
from mmqc.graph.spaces.spaces import Spaces
from mmqc.graph.spaces.towers import behind_operations, roles, towers

KEPT = "kept in floating point"


def kept(pattern: str, fqn: str, role: str) -> bool:
    """Whether a ``keep`` pattern means this module; ``lm_head`` means the output head whatever it is called."""
    if pattern == HEAD and role == "head":
        return True
    return any(fnmatchcase(fqn, p) for p in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"))


def _spares_scores(scheme: Scheme) -> bool:
    """Whether what makes queries and keys is rounded without the scheme's clip, as AWQ's authors do.

    Scores are sums of products of both, in which a clipped weight costs more than the linear's own output shows.
    """
    return scheme.weight.solver == "awq_clip" and not scheme.weight.clip_scores


@dataclass(frozen=True)
class Site:
    """One weight, the linear nodes that use it, and what it gets."""

    nodes: tuple[fx.Node, ...]
    fqn: str
    tower: str
    role: str
    scheme: Scheme

    def __str__(self) -> str:
        return f"{self.fqn}: {self.tower} {self.role} {self.scheme}"


@dataclass(frozen=True)
class AssignScheme(Pass):
    config: QuantConfig
    name = "assign_scheme"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every weight that linears use, if anything is to be quantized."""
        if not self.config.schemes:
            return
        place, role = self.places(prog)
        scores = score_weights(prog) if any(_spares_scores(s) for s in self.config.schemes.values()) else set()
        by_weight: dict[str, list[fx.Node]] = {}
        for node in prog.nodes("linear"):
            fqn = weight_of(node)
            if fqn:
                by_weight.setdefault(fqn, []).append(node)
            else:
                stacked = contraction(prog, node)
                where = stacked.fqn if stacked is not None else node.meta.get("module") or node.name
                by_weight.setdefault(where, []).append(node)
        for fqn, nodes in by_weight.items():
            scheme = self.config.scheme(place.get(nodes[0], "language"), role.get(nodes[0], ""))
            reason = self.why_not(prog, nodes, role.get(nodes[0], ""))
            if not reason and nodes[0] not in place:
                reason = "the calibrated model left it in floating point"
            if reason and (scheme is not None or reason.startswith(KEPT)):
                yield Miss(nodes[0].name, reason, fqn.removesuffix(".weight") if weight_of(nodes[0]) else fqn)
            elif scheme is not None:
                if fqn in scores and _spares_scores(scheme):
                    scheme = replace(scheme, weight=replace(scheme.weight, solver="rtn"))
                yield Site(tuple(nodes), fqn, place[nodes[0]], role.get(nodes[0], "inner"), scheme)

    def why_not(self, prog: Program, nodes: list[fx.Node], role: str) -> str:
        """The reason to refuse, or nothing."""
        fqn = weight_of(nodes[0])
        module = fqn.removesuffix(".weight")
        if not fqn:
            return "its weight is computed" if contraction(prog, nodes[0]) is None else "one of several in a parameter"
        pattern = next((p for p in self.config.keeps(role) if kept(p, module, role)), None)
        if pattern is not None:
            return f"{KEPT} ({pattern})"
        if not all(prog.hosted(n, "linear") for n in nodes):
            return "it is no nn.Linear module of its own, so it cannot be swapped"
        if prog.hosts is not None and any(n.meta.get("module") != module for n in nodes):
            return "it is no nn.Linear module of its own, so it cannot be swapped"
        if any(kind(u) != "linear" or weight_of(u) != fqn for u in prog.users_of(fqn)):
            return "another operation reads its weight"
        return ""

    def places(self, prog: Program) -> tuple[dict[fx.Node, str], dict[fx.Node, str]]:
        """Towers and roles: of the whole model where it was recorded, else as the recording's statistics say."""
        if prog.statistics is not None and prog.fragment:
            known = prog.statistics["linears"]
            found = {n: known[f] for n in prog.nodes("linear") if (f := weight_of(n)) in known}
            return {n: e["tower"] for n, e in found.items()}, {n: e["role"] for n, e in found.items()}
        spaces = Spaces.of(prog, pins=False)
        found = roles(prog, spaces)
        if self.config.down is not None:
            behind = behind_operations(spaces)
            found |= {n: "down" for n, role in found.items() if role == "out" and weight_of(n) in behind}
        return towers(prog, spaces), found | {n: "head" for n in found if HEAD in n.meta}

    def rewrite(self, prog: Program, site: Site) -> None:
        """Note it on the nodes."""
        for node in site.nodes:
            node.meta.update(tower=site.tower, role=site.role, scheme=site.scheme)
