"""Facts: named predicates over a program.  Each returns the nodes at which it fails; the runner evaluates them."""

from __future__ import annotations

from mmqc.graph.kinds import kind
from mmqc.graph.program import Program
from mmqc.graph.semantic import layer_norm, rms_norm
from mmqc.graph.spaces.coordinates import weights_behind


def ops_raised(prog: Program) -> list[str]:
    """No norm over the last axis carries a gain or bias of its own."""
    library = (n for n in prog.nodes("layer_norm", "rms_norm") if n.target not in (layer_norm, rms_norm))
    last = (n for n in library if len(n.kwargs.get("normalized_shape", n.args[1] if len(n.args) > 1 else ())) == 1)  # type: ignore[arg-type]
    return [n.name for n in last if any(weights_behind(a) for a in n.all_input_nodes)]


def linears_quantized(prog: Program) -> list[str]:
    """Every linear that has a scheme runs on codes."""
    return [n.name for n in prog.graph.nodes if kind(n) == "linear" and n.meta.get("scheme") is not None]


FACTS = {"ops.raised": ops_raised, "linears.quantized": linears_quantized}
