"""``explain``: what the compiler does with a model and one batch: passes, graphs, kernels, fallbacks, breaks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mmqc.backend import GraphRecord, backend, collect_records
from mmqc.front.front import Front, attached, detach
from mmqc.graph.capture import unwrapped
from mmqc.graph.text import text_diff
from mmqc.graph.tracing import collect_breaks
from mmqc.nn.split_calls import shared_linears
from mmqc.nn.uncompiled import uncompiled
from mmqc.ops.nonfinite import propagate_nonfinite

LIMIT = 1 << 16


@dataclass
class PassNote:
    """What one pass did, when and to which graph.

    Attributes:
        name: of the pass.
        where: ``quantize_`` (the whole model, recorded) or ``graph N`` (at compile time).
        exact: whether the pass leaves the computed function unchanged.
        sites: what was rewritten, in words.
        refusals: what was left alone, and why.
        diff: changed lines of the program, where the pass ran just now.
    """

    name: str
    where: str
    exact: bool
    sites: list[str]
    refusals: list[str]
    diff: str = ""

    def __str__(self) -> str:
        tier = "exact" if self.exact else "changes numerics"
        lines = [f"{self.where:10s} {self.name:22s} {tier:16s} {len(self.sites)} sites, {len(self.refusals)} refused"]
        lines += [f"    refused  {reason}" for reason in self.refusals]
        return "\n".join(lines)


@dataclass
class Explanation:
    """The answer of ``explain``; ``str()`` of it is for reading.

    Attributes:
        graphs: one record per graph that Dynamo handed to the backend, in order.
        passes: what ``quantize_`` did to this model, then what the backend did to each graph.
        breaks: reason and source line of each graph break, and how often.
        prepared: what runs in front of the compiled region, and what could not be prepared.
        nonfinite: the linears whose static scale met NaN or infinity, of which it makes finite numbers.
        shared: how ranks share which linears, and what they send.
    """

    graphs: list[GraphRecord] = field(default_factory=list)
    passes: list[PassNote] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    prepared: list[str] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)

    @property
    def quantized_graphs(self) -> int:
        """How many graphs hold quantized work."""
        return sum(g.quantized for g in self.graphs)

    @property
    def kernels(self) -> dict[str, int]:
        """Kernels that the compiled code calls, and how often."""
        return dict(Counter(k for g in self.graphs for k in g.kernels))

    @property
    def fallbacks(self) -> list[tuple[int, str, str]]:
        """(graph, op, reason) wherever an op did not get its kernel."""
        return [(g.index, op, reason) for g in self.graphs for op, reason in g.fallbacks]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data for a report: graphs, quantized_graphs, kernels, fallbacks, breaks."""
        fallbacks = [{"graph": i, "op": op, "reason": reason} for i, op, reason in self.fallbacks]
        return {
            "graphs": sum(g.how != "uncompiled" for g in self.graphs),
            "quantized_graphs": self.quantized_graphs,
            "kernels": self.kernels,
            "fallbacks": fallbacks,
            "breaks": self.breaks,
            **({"shared": self.shared} if self.shared else {}),
        }

    def __str__(self) -> str:
        how = Counter(g.how for g in self.graphs)
        kinds = f"{how['mmqc']} quantized, {how['inductor']} plain Inductor, {how['eager']} glue, run eagerly"
        compiled = len(self.graphs) - how["uncompiled"]
        head = f"{compiled} graph{'s' if compiled != 1 else ''}: {kinds}"
        if how["uncompiled"]:
            head += f"; not compiled, see the fallbacks: {how['uncompiled']}"
        parts = [head]
        if self.passes:
            parts.append("passes\n" + "\n".join(map(str, self.passes)))
        if self.prepared:
            parts.append("in front of the compiled region\n" + "\n".join(f"  {note}" for note in self.prepared))
        if self.shared:
            parts.append("shared by ranks\n" + "\n".join(f"  {line}" for line in self.shared))
        if self.nonfinite:
            parts.append("NaN or infinity meets static scales, which make finite numbers of it\n  " + "\n  ".join(self.nonfinite))
        parts.append("graphs\n" + "\n".join(map(str, self.graphs)))
        fallbacks = "\n".join(f"  graph {i} {op}: {reason}" for i, op, reason in self.fallbacks) or "  none"
        parts.append(f"fallbacks\n{fallbacks}")
        if self.breaks:
            parts.append("graph breaks\n" + "\n".join(f"  {n} x {reason}" for reason, n in self.breaks.items()))
        return "\n\n".join(parts)


NOTHING = (
    "nothing was compiled: Dynamo skips this code; what reached the limit of recompilations earlier in this process it skips too "
    "(torch._dynamo.reset() lifts that, and drops what is compiled)"
)


@torch.no_grad()
def explain(model: nn.Module, inputs: Mapping[str, Any], *, options: Mapping[str, Any] | None = None) -> Explanation:
    """Compile ``model`` for ``inputs`` and tell what happened; the model and its own compiled code are left alone.

    Args:
        model: quantized or not.
        inputs: one keyword batch.
        options: as for ``torch.compile(model, backend="mmqc", options=...)``.

    Returns:
        Passes (those of ``quantize_`` included: the record travels with the model), graphs, kernels, fallbacks, breaks.
    """
    # A backend object of its own: Dynamo reuses code only for the same backend, so every graph is recorded now.
    fresh = functools.partial(backend, options=options)
    model = unwrapped(model)
    had_front = attached(model) is not None
    front = Front.attach(model)
    try:
        # every call here adds an entry to Dynamo's caches: past its limit it would run the model uncompiled
        with (
            collect_records() as graphs,
            collect_breaks() as breaks,
            torch._dynamo.config.patch(recompile_limit=LIMIT, accumulated_recompile_limit=LIMIT),
            uncompiled(model),
        ):
            torch.compile(model, backend=fresh)(**inputs)
    finally:
        if not had_front:
            detach(model)
    passes = [*_recorded(model), *(note for g in graphs for note in _notes(g))]
    lines = Counter(f"{b.reason} at {b.where}" for b in breaks)
    nonfinite = _nonfinite(model, inputs)
    return Explanation(
        graphs, passes, dict(lines) | ({} if graphs else {NOTHING: 1}), front.notes, nonfinite, shared_linears(model)
    )


def _nonfinite(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The static linears that an eager forward hands NaN or infinity to; damage spreads to those behind, in which it shows, too."""
    found: dict[str, None] = {}

    def look(name: str, args: tuple[Any, ...]) -> None:
        if not bool(args[0].isfinite().all()):
            found[name] = None

    static = {name: m for name, m in model.named_modules() if getattr(m, "input_scale", None) is not None}
    hooks = [m.register_forward_pre_hook(lambda _, args, name=name: look(name, args)) for name, m in static.items()]
    try:
        if static:
            with propagate_nonfinite():
                model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return list(found)


def _recorded(model: nn.Module) -> list[PassNote]:
    """What ``quantize_`` left in the model's config."""
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    record = getattr(quantization, "record", None) or {}
    return [PassNote(p["name"], "quantize_", p["exact"], p["sites"], p["misses"]) for p in record.get("passes", ())]


def _notes(graph: GraphRecord) -> list[PassNote]:
    return [
        PassNote(r.name, f"graph {graph.index}", r.exact, r.sites, [str(m) for m in r.misses], text_diff(r.before, r.after))
        for r in graph.passes
        if r.sites or r.misses
    ]
