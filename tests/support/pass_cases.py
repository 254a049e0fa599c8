"""What every pass's tests do: the program in front of a pass, exactness, running twice, golden text."""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from blocks import MODELS
from float64 import EXACT, passed, recorded, relative_error, replayed
from torch import Tensor, nn

from mmqc.config import QuantConfig
from mmqc.graph.program import Program
from mmqc.graph.runner import Pass
from mmqc.graph.text import program_text, text_diff
from mmqc.passes.fold_layer_scale import FoldLayerScale
from mmqc.passes.fold_norm_mean import FoldNormMean
from mmqc.passes.fold_norm_scale import FoldNormScale
from mmqc.passes.fold_signs import FoldSigns
from mmqc.passes.fuse_rotation import FuseRotation
from mmqc.passes.insert_hadamard import InsertHadamard
from mmqc.passes.raise_linear import RaiseLinear
from mmqc.passes.raise_ops import RaiseOps

GOLDEN = Path(__file__).parents[1] / "passes_tests" / "golden"
CASES = sorted(MODELS)
EXACT_PASSES: tuple[Pass, ...] = (
    RaiseOps(),
    RaiseLinear(),
    FoldLayerScale(),
    FoldNormMean(),
    FoldNormScale(),
    FuseRotation(),
    FoldSigns(),
    InsertHadamard(),
)


@functools.cache
def built(case: str) -> tuple[nn.Module, dict[str, Any]]:
    """One of the hand-written models; do not change it."""
    return MODELS[case]()


def program(case: str, item: Pass) -> Program:
    """The model's program after all exact passes in front of ``item``."""
    return prepared(*built(case), item)


def prepared(model: nn.Module, batch: dict[str, Any], item: Pass) -> Program:
    """A program after all exact passes in front of ``item``."""
    names = [p.name for p in EXACT_PASSES]
    stop = names.index(item.name) if item.name in names else len(names)
    return passed(recorded(model, batch), EXACT_PASSES[:stop])


def check_exact(prog: Program, item: Pass) -> None:
    """The program computes the same with and without the pass."""
    expected = replayed(prog)
    passed(prog, [item])
    assert relative_error(replayed(prog), expected) < EXACT


def check_once(prog: Program, item: Pass) -> None:
    """A second run finds nothing and changes nothing."""
    passed(prog, [item])
    text, steps = program_text(prog), {name: prog.derived(name) for name in prog.changed}
    passed(prog, [item])
    assert prog.records[-1].sites == []
    assert program_text(prog) == text
    assert {name: prog.derived(name) for name in prog.changed} == steps


def misses(model: nn.Module, batch: dict[str, Any], item: Pass) -> dict[str, str]:
    """What the pass refuses, and that the program is right all the same: reason by weight, or by node."""
    prog = prepared(model, batch, item)
    nodes = {n.name for n in prog.graph.nodes}
    check_exact(prog, item)
    found = prog.records[-1].misses
    assert {m.node for m in found} <= nodes
    return {m.fqn or m.node: m.reason for m in found}


def check_golden(prog: Program, item: Pass, case: str) -> None:
    """Sites, refusals, changed lines and changed weights are as in the stored text; MMQC_ACCEPT=1 stores it anew."""
    steps = {name: len(prog.derived(name)) for name in prog.weights}
    passed(prog, [item])
    record = prog.records[-1]
    changed = {name: [s.formula for s in prog.derived(name)[steps.get(name, 0) :]] for name in prog.changed}
    parts = {
        "sites": sorted(record.sites),
        "refused": sorted(map(str, record.misses)),
        "program": text_diff(record.before, record.after).splitlines(),
        "weights": [f"{name}: {'; '.join(formulas)}" for name, formulas in sorted(changed.items()) if formulas],
        "meta": [f"{n.name}: {n.meta[k]}" for n in prog.graph.nodes for k in ("scheme", "outliers") if k in n.meta],
    }
    text = "\n".join(f"{head}\n" + "".join(f"    {line}\n" for line in lines) for head, lines in parts.items() if lines)
    path = GOLDEN / f"{item.name}.{case}.txt"
    if os.environ.get("MMQC_ACCEPT"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "set MMQC_ACCEPT=1 to accept the new text"


def scheme_config(**more: Any) -> QuantConfig:
    """W8A8 for everything but the head."""
    from mmqc.recipes import rtn

    return rtn(8, 8).replace(**more)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
