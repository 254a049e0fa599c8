"""In which modules' forwards a channel space can be seen: where a module that was not recorded might read or write it.

an operation on it, in the forward of m          m, and whoever called m
two such modules                                 all on the way between them, up to the first that holds both
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from mmqc.graph.program import Program
from mmqc.graph.spaces.coordinates import compact, distinct, leaves
from mmqc.graph.spaces.factors import owners
from mmqc.graph.spaces.spaces import Spaces


def changed_frames(prog: Program) -> set[str]:
    """FQNs of the modules ("" is the model) in which a space is seen whose basis or scale the passes have changed."""
    spaces = Spaces.of(prog, through_norms=False)
    owner = owners(spaces)
    changed = {i for i, space in enumerate(spaces) if any((t.fqn, t.axis) in prog.touched for t in space.touches)}
    seen: dict[int, set[str]] = {i: set() for i in changed}
    for node, shadow in spaces.found.shadows.items():
        for ids in leaves(shadow):
            for number in _numbers(spaces, owner, ids):
                if number in changed:
                    seen[number] |= {node.meta[key] for key in ("module", "caller") if key in node.meta}
    for i in changed:
        for touch in spaces.spaces[i].touches:
            seen[i] |= {touch.node.meta[key] for key in ("module", "caller") if key in touch.node.meta}
    return {frame for modules in seen.values() for frame in _between(modules)}


def _numbers(spaces: Spaces, owner: Tensor, ids: Tensor) -> list[int]:
    few = compact(ids)[0]
    known = few[few >= 0].long()
    return distinct(owner[spaces.classes[known]]).tolist() if known.numel() else []


def _between(modules: Iterable[str]) -> set[str]:
    """These modules and what holds them, up to what holds them all."""
    paths = [tuple(filter(None, name.split("."))) for name in modules]
    alike = (len(set(parts)) == 1 for parts in zip(*paths, strict=False))
    common = sum(itertools.takewhile(bool, alike))
    return {".".join(path[:length]) for path in paths for length in range(common, len(path) + 1)}
