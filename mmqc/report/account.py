"""What the passes did to each weight, and what they refused, in words for the report."""

from __future__ import annotations

from mmqc.graph.program import Program
from mmqc.report.report import Refusal

FOLDED = {"fold_norm_scale": "norm gain folded", "fold_layer_scale": "layer scale folded"}


def transforms(prog: Program) -> dict[str, tuple[str, ...]]:
    """What the rewrites did to each weight, in words."""
    found: dict[str, list[str]] = {}
    for record_ in prog.records:
        for site in record_.sites if record_.name in FOLDED or record_.name == "insert_hadamard" else ():
            head, _, tail = site.partition(" -> ") if " -> " in site else site.partition(": ")
            if record_.name == "insert_hadamard":
                found.setdefault(head, []).append(f"online {tail}")
            else:
                for fqn in tail.split(", "):
                    found.setdefault(fqn, []).append(FOLDED[record_.name])
    for fqn, axes in prog.decided.rotated.items():
        found.setdefault(fqn, []).extend("rotated out" if axis == 0 else "rotated in" for axis in sorted(axes))
    for part in (p for s in prog.decided.scalings for p in s.parts):
        found.setdefault(part.fqn, []).append("channel scale in" if part.reads else "channel scale out")
    for fqn, axis in sorted(prog.decided.flipped):
        found.setdefault(fqn, []).append("signs out" if axis == 0 else "signs in")
    return {fqn: tuple(words) for fqn, words in found.items()}


def refusals(prog: Program) -> list[Refusal]:
    """Misses of all passes, but for rotations that a later online Hadamard made up for."""
    made_up = prog.decided.hadamards
    return [
        Refusal(fqn, m.node, f"{r.name}: {m.reason}")
        for r in prog.records
        for m in r.misses
        for fqn in m.fqn.split(", ")
        if not (r.name == "fuse_rotation" and fqn in made_up)
    ]
