"""The run-time passes on an exported program: what ``torch.compile`` fuses, a package has fused as well.

    program  ─ torch_form ─►  Dynamo's form  ─ run_time_passes ─►  the same, fused  ─ run_decompositions ─►  aten's ops and ours

Left out are the passes for a wrapper in Python (reads of the host, prompts whose kernels it chooses).  Scales that are equal are
equal for good: a program and its weights are one.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from mmqc.aot.torch_form import torch_form
from mmqc.graph.program import Program
from mmqc.graph.runner import run
from mmqc.pipeline import FACTS, run_time_passes


def fused(program: ExportedProgram) -> ExportedProgram:
    """The same function of the same inputs and weights; the program itself where nothing is to be fused."""
    prog = Program(torch_form(program.graph), {}, _values(program), fragment=True)
    left_out = dict.fromkeys(("caches", "counters", "prompts", "reads"), False)
    quantized = any(str(n.target).startswith("mmqc.") for n in prog.graph.nodes)
    run(prog, run_time_passes("sequence", quantized=quantized, **left_out), FACTS)
    if not any(record.sites for record in prog.records):
        return program
    new = copy.copy(program)
    module = fx.GraphModule(program.graph_module, prog.graph)
    module.meta.update(program.graph_module.meta)
    new._graph_module = module
    return new


def _values(program: ExportedProgram) -> list[Any]:
    """Of the graph's placeholders: weights as they are, inputs without values."""
    specs = program.graph_signature.input_specs
    holders = [n for n in program.graph.nodes if n.op == "placeholder"]
    weights = {**program.constants, **program.state_dict}
    return [
        weights[spec.target] if spec.kind != InputKind.USER_INPUT and spec.target in weights else holder.meta["val"]
        for spec, holder in zip(specs, holders, strict=True)
    ]
