"""Where a linear stands: in the vision tower, in the projector between the towers, or in the language model.

language    depends on the token ids (or on given token embeddings)
vision      writes a residual stream of its own that is not the language model's, or feeds one that does
projector   what is left between the two
"""

from __future__ import annotations

from torch import fx

from .kinds import kind
from .program import Program
from .spaces import Spaces

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


def towers(prog: Program, spaces: Spaces) -> dict[fx.Node, str]:
    """vision, projector or language for every linear and convolution."""
    work = prog.nodes("linear", "conv")
    text = _downstream([n for n in prog.graph.nodes if n.op == "placeholder" and n.target in TEXT_INPUTS])
    streams = [s for s in spaces if s.norms or s.mean_pins]
    own = [
        t.node
        for s in streams
        if not any(t.node in text for t in s.touches)
        for t in s.writers
        if kind(t.node) in ("linear", "conv") and t.node not in text
    ]
    vision = _upstream(own)
    has_text = any(n in text for n in work)
    return {n: "language" if n in text or not has_text else "vision" if n in vision else "projector" for n in work}


def roles(prog: Program, spaces: Spaces) -> dict[fx.Node, str]:
    """What a linear does: ``in`` reads a normed stream, ``out`` writes one, ``inner`` neither, ``head`` makes the output."""
    reads = {t.node for s in spaces if s.norms or s.mean_pins for t in s.readers}
    writes = {t.node for s in spaces if s.norms or s.mean_pins for t in s.writers}
    heads = {t.node for s in spaces if s.outputs for t in s.writers}
    found = {}
    for node in prog.nodes("linear"):
        found[node] = "head" if node in heads else "out" if node in writes else "in" if node in reads else "inner"
    return found
