"""Where a linear stands: in the vision tower, in the projector between the towers, or in the language model.

language    depends on the token ids (or on given token embeddings)
vision      writes a residual stream of its own that is not the language model's, or feeds one that does
projector   what is left between the two
"""

from __future__ import annotations

from torch import fx

from mmqc.graph.linear import weight_of
from mmqc.graph.program import Program
from mmqc.graph.spaces.spaces import Spaces

TEXT_INPUTS = ("input_ids", "decoder_input_ids", "inputs_embeds")


def _downstream(starts: list[fx.Node]) -> set[fx.Node]:
    seen = set(starts)
    todo = list(starts)
    while todo:
        for user in todo.pop().users:
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return seen


def _upstream(starts: list[fx.Node]) -> set[fx.Node]:
    seen = set(starts)
    todo = list(starts)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return seen


def _calls(prog: Program) -> dict[str, list[fx.Node]]:
    """Linears and convolutions by the weight that they use: a recording of several batches calls each several times."""
    found: dict[str, list[fx.Node]] = {}
    for node in prog.nodes("linear", "conv"):
        found.setdefault(weight_of(node), []).append(node)
    return found


def towers(prog: Program, spaces: Spaces) -> dict[fx.Node, str]:
    """vision, projector or language for every linear and convolution."""
    calls = _calls(prog)
    text = _downstream([n for n in prog.graph.nodes if n.op == "placeholder" and n.target in TEXT_INPUTS])
    spoken = {fqn for fqn, nodes in calls.items() if any(n in text for n in nodes)}
    own = [
        node
        for s in spaces
        if (s.norms or s.mean_pins) and not any(t.fqn in spoken or t.node in text for t in s.touches)
        for t in s.writers
        if t.fqn not in spoken
        for node in calls.get(t.fqn, ())
    ]
    vision = _upstream(own)
    has_text = bool(spoken)
    return {
        n: "language" if n in text or not has_text else "vision" if n in vision else "projector"
        for nodes in calls.values()
        for n in nodes
    }


def roles(prog: Program, spaces: Spaces) -> dict[fx.Node, str]:
    """What a linear does: ``in`` reads a normed stream, ``out`` writes one, ``inner`` neither, ``head`` makes the output.

    Keys and values that leave the graph for a cache are outputs too, but no head: other linears depend on them.
    """
    streams = [s for s in spaces if s.norms or s.mean_pins]
    reads = {t.fqn for s in streams for t in s.readers}
    writes = {t.fqn for s in streams for t in s.writers}
    heads = {t.fqn for s in spaces if s.outputs for t in s.writers}
    feeding = _upstream([source for node in prog.nodes("linear") for source in node.all_input_nodes])
    heads -= {weight_of(node) for node in prog.nodes("linear") if node in feeding}
    found = {}
    for node in prog.nodes("linear"):
        fqn = weight_of(node)
        found[node] = "head" if fqn in heads else "out" if fqn in writes else "in" if fqn in reads else "inner"
    return found


def behind_operations(spaces: Spaces) -> set[str]:
    """Weights of linears whose input channels an operation makes, a non-linearity for instance, and no linear writes."""
    made = (s for s in spaces if not s.writers and any(source.what == "op" for source in s.made))
    return {touch.fqn for space in made for touch in space.readers}
