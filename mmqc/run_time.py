"""The passes that belong to run time: they change where rows lie while the model runs, never what is stored.

    sequence   rows stay where they are, each quantized with the scale of its own modality
    modality   reorder_tokens, rewrite_mask, rewrite_rope_index
    auto       the rule in ``token_passes``

They run on a whole Dynamo graph, after the backend's own quantization, and need only shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .compile_options import CompileOptions
from .graph.program import KEPT, PassRecord, Program
from .graph.runner import Pass, run
from .graph.tokens import visual_mask, visual_operand
from .passes.facts import FACTS
from .passes.reorder_tokens import ReorderTokens
from .passes.rewrite_mask import RewriteMask
from .passes.rewrite_rope_index import RewriteRopeIndex


def token_passes(order: str, attention: str) -> tuple[Pass, ...]:
    """The passes of ``token_order``; "auto" is "sequence" as long as no kernel splits its rows at one index.

    A kernel that takes its row's scale in the epilogue gains nothing from modality order, and the gathers cost something.
    """
    if order != "modality":
        return ()
    return (ReorderTokens(attention), RewriteMask(attention), RewriteRopeIndex(attention))


def run_time_passes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], request: CompileOptions, *, text: bool = False
) -> tuple[fx.GraphModule, list[PassRecord]]:
    """The graph after its run-time passes, and their records; a graph without a visual mask is returned as it is."""
    passes = token_passes(request.token_order, request.attention_order)
    if not passes or not any(visual_operand(n) for n in gm.graph.nodes):
        return gm, []
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {}, return_output_node=True)
    assert output is not None
    graph.output(output[0])  # type: ignore[arg-type]
    for node in graph.nodes:
        if not node.users:  # Dynamo has removed what is dead: the rest checks something, or opens or closes a vmap
            node.meta[KEPT] = True
    _fill_values(graph, example_inputs)
    prog = Program(graph, {}, list(example_inputs), fragment=True)
    if visual_mask(prog) is None:
        return gm, []
    run(prog, passes, FACTS, text=text)
    if not prog.nodes("modality_order"):
        return gm, prog.records
    return fx.GraphModule(gm, graph), prog.records


def _fill_values(graph: fx.Graph, example_inputs: Sequence[Any]) -> None:
    """Example values for the nodes that earlier passes made, as Dynamo left them on its own."""
    modes = (getattr(n.meta.get("example_value"), "fake_mode", None) for n in graph.nodes)
    mode = next((m for m in modes if m is not None), None)
    examples = iter(example_inputs)
    for node in graph.nodes:
        given = next(examples) if node.op == "placeholder" else None
        if "example_value" in node.meta or mode is None:
            continue
        if node.op == "placeholder":
            real = isinstance(given, Tensor) and getattr(given, "fake_mode", None) is not mode
            node.meta["example_value"] = mode.from_tensor(given, static_shapes=True) if real else given
        elif node.op in ("call_function", "call_method"):
            _compute(node, mode)


def _compute(node: fx.Node, mode: Any) -> None:
    """Run one operation on its operands' example values; where one has none, the result has none."""
    if any("example_value" not in n.meta for n in node.all_input_nodes):
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    with mode, torch.no_grad():
        call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        node.meta["example_value"] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)  # type: ignore[operator]
