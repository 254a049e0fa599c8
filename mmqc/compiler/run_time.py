"""Run the passes that belong to run time on a compiled graph; ``mmqc/pipeline.py`` has their order.

They run on a whole Dynamo graph, after the backend's own quantization, and need only shapes.  What share_quantize takes for
granted of values is looked at again in every call (``where_equal``); what reorder_reads puts in front runs before the compiled
graph (``reading_first``).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from mmqc.compiler.graph_content import has_heavy_op, mmqc_ops
from mmqc.compiler.options import CompileOptions
from mmqc.compiler.stamp import Stamp
from mmqc.graph.capture import keep_notes
from mmqc.graph.kinds import kind
from mmqc.graph.program import KEPT, PassRecord, Program
from mmqc.graph.runner import run
from mmqc.graph.sizes import sizes
from mmqc.graph.tokens.tokens import visual_mask, visual_operand
from mmqc.passes.fold_query_groups import one_query
from mmqc.passes.fuse_counters import moves_counter
from mmqc.passes.fuse_matmuls import FUSED
from mmqc.passes.reorder_reads import EARLY, READS
from mmqc.passes.rewrite_empty_cat import only_operand
from mmqc.passes.rewrite_patch_conv import site_of
from mmqc.passes.rewrite_prompt_attention import is_prompt
from mmqc.passes.rewrite_scatter import scatter_of
from mmqc.passes.share_quantize import EQUALS, equal

logger = logging.getLogger(__name__)
REMEMBERED = 64
UNEQUAL = (
    "input scales that were equal when this graph was compiled differ now (other scales were loaded): the graph runs uncompiled, "
    "without shared quantization; call torch._dynamo.reset() to compile it anew"
)


class AtRunTime(NamedTuple):
    """A graph after its run-time passes, their records, pairs of inputs that it takes for equal, and what to run before it."""

    gm: fx.GraphModule
    records: list[PassRecord]
    equal: list[tuple[int, int]]
    first: Callable[..., Any] | None = None


def rewrite_at_run_time(
    gm: fx.GraphModule, example_inputs: Sequence[Any], request: CompileOptions, *, text: bool = False
) -> AtRunTime:
    """Run them; a graph in which they find nothing is returned as it is."""
    visual = request.token_order == "modality" and any(visual_operand(n) for n in gm.graph.nodes)
    names = {str(n.target).removeprefix("mmqc.").removeprefix("aten.").removesuffix(".default") for n in gm.graph.nodes}
    content: dict[str, Any] = {
        "caches": any(only_operand(n) is not None for n in gm.graph.nodes),
        "counters": sum(map(moves_counter, gm.graph.nodes)) > 1,
        "patches": any(site_of(n) is not None for n in gm.graph.nodes),
        "prompts": any(is_prompt(n) for n in gm.graph.nodes),
        "queries": any(one_query(n) for n in gm.graph.nodes),
        "quantized": bool(names & {*FUSED, "quantize", "quantize_per_token"}),
        "reads": bool(names & READS) and (has_heavy_op(gm) or bool(mmqc_ops(gm))),
        "scatters": any(scatter_of(n) is not None for n in gm.graph.nodes),
        "why_not_shared": _why_not_shared(gm) if request.collectives == "shared" else None,
    }
    if not visual and not any(content.values()):
        return AtRunTime(gm, [], [])
    # A graph without any of that needs neither the passes nor what they import, such as torchao.
    from mmqc.pipeline import FACTS, run_time_passes

    prog = _program(gm, example_inputs)
    mask = visual_mask(prog) if visual else None
    ordered = mask is not None and (sizes(mask) or (0,))[-1] != 1  # the one row of a decode step has no order
    order = request.token_order if ordered else "sequence"
    run(prog, run_time_passes(order, request.attention_order, **content), FACTS, text=text)
    if not any(record.sites for record in prog.records):
        return AtRunTime(gm, prog.records, [])
    holders = [n for n in prog.graph.nodes if n.op == "placeholder"]
    pairs = [(i, holders.index(n.meta[EQUALS])) for i, n in enumerate(holders) if EQUALS in n.meta]
    first = _first(gm, prog.graph) if any(EARLY in n.meta for n in prog.graph.nodes) else None
    new = fx.GraphModule(gm, prog.graph)
    keep_notes(new, gm, range(len(holders)))
    return AtRunTime(new, prog.records, pairs, first)


def _why_not_shared(gm: fx.GraphModule) -> Callable[[str, Tensor], str | None] | None:
    """What knows which groups share memory; None for a graph without sums over ranks."""
    if not any(kind(n) == "all_reduce" for n in gm.graph.nodes):
        return None
    from mmqc.kernels.shared.inboxes import OPENED

    return OPENED.why_not


def _program(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Program:
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {}, return_output_node=True)
    assert output is not None
    graph.output(output[0])  # type: ignore[arg-type]
    for node in graph.nodes:
        if not node.users:  # Dynamo has removed what is dead: the rest checks something, or opens or closes a vmap
            node.meta[KEPT] = True
    _fill_values(graph, example_inputs)
    return Program(graph, {}, list(example_inputs), fragment=True)


def _first(gm: fx.GraphModule, graph: fx.Graph) -> Callable[..., Any]:
    """Take out of ``graph`` what is to run before it, as a function of all its inputs."""
    first = fx.Graph()
    early = [n for n in graph.nodes if EARLY in n.meta]
    inputs = {n for e in early for n in e.all_input_nodes if n.op == "placeholder"}
    holders = [(i, n) for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder") if n in inputs]
    known = {n: first.node_copy(n) for _, n in holders}
    for node in early:
        known[node] = first.node_copy(node, known.__getitem__)
    first.output(())
    for node in reversed(early):
        if not node.users:  # what the rest reads as well is computed once more there
            graph.erase_node(node)
    run_first, places = fx.GraphModule(gm, first).forward, [i for i, _ in holders]
    return lambda *args: run_first(*(args[i] for i in places))


def reading_first(first: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``first``, which waits for nothing but the inputs and raises where a check fails, and then ``compiled``."""

    def call(*args: Any) -> Any:
        first(*args)
        return compiled(*args)

    return call


def where_equal(fused: Callable[..., Any], pairs: Sequence[tuple[int, int]], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``fused`` with inputs whose ``pairs`` are equal, and ``plain`` with others, saying so once.

    A pair is compared when one of its tensors is new or was written to since: once, for a model that stays as it is.
    """
    known: dict[tuple[int, ...], tuple[Stamp, bool]] = {}
    places = sorted({place for pair in pairs for place in pair})

    def call(*args: Any) -> Any:
        scales = [args[i] for i in places]
        key = tuple(map(id, scales))
        if key not in known or not known[key][0].same(scales):
            if len(known) >= REMEMBERED:
                known.clear()
            known[key] = Stamp(scales), all(equal(args[i], args[j]) for i, j in pairs)
            if not known[key][1]:
                logger.warning(UNEQUAL)
        return (fused if known[key][1] else plain)(*args)

    return call


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
    if node.target is operator.setitem or any("example_value" not in n.meta for n in node.all_input_nodes):
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    with mode, enable_python_dispatcher(), torch.no_grad():  # in C++ alone, what a linear is made of knows no symbols in torch 2.11
        call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        node.meta["example_value"] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)  # type: ignore[operator]
