"""What was computed in front of the last call of a kind serves the next one, if that brings the same values.

    images of the last call's sizes, text with its images in the same places  ->  the same positions, lengths and window orders

Why:     computing these is many small steps, in which the device waits; comparing the inputs is one for each of them.
Safe:    only for functions of inputs and constants; inputs and results are kept as copies, and each call gets copies of its own:
         a model may hold on to them (``rope_deltas``) or write to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mmqc.front.handover import Handed, Site, ValueSite
from mmqc.front.provenance import Input, leaves, parts

CONSTANTS = (type(None), bool, int, float, str, slice, type(...), torch.dtype, torch.device)


class Kept:
    """The latest results for calls of one kind."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.names = _read_by(list(sites))
        self.inputs: dict[str, Tensor] = {}
        self.handed: Handed | None = None

    def get(self, inputs: Mapping[str, Any]) -> Handed | None:
        """The results for ``inputs``, ready to be read from the start; None if they have to be computed."""
        if self.handed is None or self.names is None:
            return None
        if not all(_same(self.inputs[name], inputs.get(name)) for name in self.names):
            return None
        return copied(self.handed)

    def put(self, inputs: Mapping[str, Any], handed: Handed) -> None:
        """Keep them."""
        results = [t for t in pytree.tree_leaves((handed.values, handed.arguments)) if isinstance(t, Tensor)]
        # an inference tensor is of no use outside of inference mode; features are not worth comparing
        if self.names is None or any(t.is_inference() for t in results) or not set(self.names) <= set(inputs):
            return
        self.inputs = {name: inputs[name].clone() for name in self.names}
        self.handed = copied(handed)


def copied(handed: Handed) -> Handed:
    """Tensors of its own, and nothing of it taken."""
    values, arguments = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (handed.values, handed.arguments))
    return Handed(values, [0] * len(handed.taken), arguments)


def _same(a: Tensor, b: Any) -> bool:
    alike = isinstance(b, Tensor) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and torch.equal(a, b)


def _read_by(sites: list[Site]) -> list[str] | None:
    """The inputs that decide the results; None if something else may."""
    names = {leaf.name for site in sites if isinstance(site, ValueSite) for call in site.calls for leaf in leaves(call)}
    names |= {name for site in sites if not isinstance(site, ValueSite) for name in site.sources.values()}
    held = (v for site in sites if isinstance(site, ValueSite) for call in site.calls for v in _constants(call))
    return sorted(names) if all(isinstance(v, CONSTANTS) or _is_config(v) for v in held) else None


def _is_config(value: Any) -> bool:
    """A part's config, which stays as it is once the model is built."""
    return isinstance(getattr(value, "model_type", None), str)


def _constants(recipe: Any) -> Iterator[Any]:
    inside = list(parts(recipe))
    for part in inside:
        yield from _constants(part)
    if not inside and not isinstance(recipe, (Input, dict, tuple, list)):
        yield recipe
