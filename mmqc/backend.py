"""START HERE: the torch.compile backend, from Dynamo's graph to kernels.

    Dynamo graph ─ [quantize_graph, with options={"config": …}] ─ run_time_passes ─┬─ mmqc ops    ─► Inductor with mmqc's lowerings
                                                                                  ├─ heavy ops   ─► Inductor as it is
                                                                                  └─ neither     ─► run as it is, no compile time

Found by name through the entry point ``torch_dynamo_backends: mmqc``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmqc.compiler import graph_content
from mmqc.compiler import record as compile_record
from mmqc.compiler.options import CompileOptions
from mmqc.compiler.record import GraphRecord, collect_records
from mmqc.compiler.recorded_sizes import recorded
from mmqc.compiler.regions import compile_by_regions
from mmqc.compiler.run_time import reading_first, rewrite_at_run_time, where_equal
from mmqc.compiler.step_replay import noted
from mmqc.compiler.torchao_graph import adopt_torchao
from mmqc.front.front import after_trace, before_trace
from mmqc.front.tables import keep_tables
from mmqc.graph.runner import check_trace
from mmqc.graph.tracing import Frame, Tracing, traced_place

logger = logging.getLogger(__name__)
_told: set[tuple[str, str]] = set()
UNCOMPILED = (
    "%s cannot be compiled, for it needs a value that only data says (%s): it runs as it is, and what it calls is compiled by "
    "itself, which is slower; mmqc.explain lists it among its fallbacks, torch.compile(..., fullgraph=True) makes it an error"
)

__all__ = ["GraphRecord", "backend", "collect_records"]


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs; ``mode`` and ``options`` are torch.compile's."""
    request = CompileOptions.read(mode, options)
    check_trace()
    rewritten = None
    if request.config is not None:
        # Only this option needs the passes and what they import.
        from mmqc.compiler.self_quantize import quantize_graph, session_for

        rewritten = quantize_graph(gm, example_inputs, session_for(request.config))
    if rewritten is not None:
        gm, example_inputs = rewritten.gm, rewritten.inputs
    theirs = adopt_torchao(gm, example_inputs)
    before = gm
    gm, at_run_time, pairs, first = rewrite_at_run_time(gm, example_inputs, request, text=compile_record.collecting())
    ops = graph_content.mmqc_ops(gm)
    n_ops = sum(1 for _ in graph_content.calls(gm))
    heavy = bool(ops) or graph_content.has_heavy_op(gm)
    how = "mmqc" if ops else "inductor" if heavy else "eager"
    passes = [*(rewritten.records if rewritten is not None else []), *([theirs] if theirs else []), *at_run_time]
    record = GraphRecord(0, n_ops, how=how, quantized=bool(ops), ops=ops, passes=passes, where=traced_place())
    if ops:
        keep_tables(gm)
    compiled = _lower(gm, example_inputs, request, record) if heavy else gm.forward
    if first is not None:
        compiled = reading_first(first, compiled)
    if pairs:
        compiled = where_equal(compiled, pairs, before.forward)
    compiled = noted(compiled, recordable=heavy and rewritten is None and bool(_patches(request).get("triton.cudagraphs")))
    compile_record.add(record)
    return compiled if rewritten is None else rewritten.wrap(compiled)


def _lower(gm: fx.GraphModule, example_inputs: Sequence[Any], request: CompileOptions, record: GraphRecord) -> Callable[..., Any]:
    # Inductor takes seconds to import: only for a graph that needs it.
    import mmqc.lowering
    from mmqc.lowering import inductor
    from mmqc.lowering.joined_cpp import waiting_at_the_end
    from mmqc.lowering.kernel_names import kernel_names
    from mmqc.lowering.torch_kernels import torch_kernels

    request.check_inductor_keys(inductor.config_keys())
    patches = _patches(request)

    kernels: list[list[str]] = []  # of each part that is compiled, and what fell back there
    fallbacks: list[list[tuple[str, str]]] = []

    def observe(graph: fx.GraphModule, source: str) -> None:
        kernels[-1] += kernel_names(source)
        fallbacks[-1] += mmqc.lowering.fallbacks(graph)

    def compile_(part: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kernels.append([])
        fallbacks.append([])
        return inductor.compile_graph(part, inputs, patches, observe if compile_record.collecting() else None)

    started = time.perf_counter()
    on_cpu = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, Tensor))
    # a sum in another order moves a value across a tie now and then: what rounds is compiled with torch's kernels
    as_eager = on_cpu and any("quantize" in name for name in record.ops)
    with torch_kernels() if as_eager else nullcontext():
        whole = not request.regions or (not on_cpu and patches.get("triton.cudagraphs"))
        with waiting_at_the_end():
            regions = None if whole else compile_by_regions(gm, example_inputs, compile_, inductor.depends)
        compiled = compile_(gm, example_inputs) if regions is None else regions.forward
    order = regions.order if regions is not None else (0,)
    record.kernels = [name for part in order for name in kernels[part]]
    record.fallbacks = [one for part in order for one in fallbacks[part]]
    record.compile_seconds = time.perf_counter() - started
    # CUDA graphs of Inductor's own are others, recorded at once
    if patches.get("triton.cudagraphs"):
        return compiled
    return recorded(compiled, request.recorded_sizes, example_inputs, regions.halves if regions is not None else None)


def _patches(request: CompileOptions) -> dict[str, Any]:
    """Inductor's options."""
    from mmqc.lowering import inductor

    return {**(inductor.mode_patches(request.mode) if request.mode else {}), **request.inductor}


def _before_trace(frame: Frame) -> tuple[bool, bool]:
    if any(t.dim() > 1 for t in chain(frame.model.parameters(), frame.model.buffers())):  # a product to generate code for
        if torch.cuda.is_available():
            import mmqc.lowering.compile_elsewhere

            mmqc.lowering.compile_elsewhere.start()
        else:  # the code will be C++
            import mmqc.lowering.early_compiler

            mmqc.lowering.early_compiler.start()
    return before_trace(frame)


def _after_trace(model: nn.Module | None, failed: str) -> None:
    if failed:
        place = traced_place()
        compile_record.add(GraphRecord(0, 0, how="uncompiled", fallbacks=[("function", failed)], where=place))
        if (place, failed) not in _told:
            _told.add((place, failed))
            logger.warning(UNCOMPILED, place, failed)
    if model is not None:
        after_trace(model, failed)


# Dynamo imports this module when torch.compile() is called, before anything is traced.
Tracing(backend, _before_trace, _after_trace).install()
