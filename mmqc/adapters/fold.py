"""A term of an adapter, carried into the basis in which mmqc has put its linear.

    W <- M W R   ⇒   W + s B A <- M W R + s (M B) (A R)          b <- b + W β   ⇒   c <- c + B (A β)

Shapes:  A [r, K]   B [N, r]   c [N]   β [K], of the norm in front   M [N, N], R [K, K] what the passes did, never formed
Why:     rewrites are linear in the weight, so what they do to W + s B A they do to each summand; its rank stays r.
Exact:   float64, rounded once to the dtype that the term is stored in.
Where the linear multiplies its input by a Hadamard matrix first, A reads what comes before that: H and Hᵀ cancel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmqc.adapters.errors import AdapterError
from mmqc.adapters.read import Layer
from mmqc.graph.changes import Moved, Placed, Spread, Step, Unknown


def fold(layer: Layer, steps: Iterable[Step], fqn: str) -> Layer:
    """The layer in float64, behind every step that was taken on its linear's weight.

    Raises:
        AdapterError: a step is none that can be applied to a term; names it and the linear.
    """
    down, up = layer.down.double(), layer.up.double()
    bias = up.new_zeros(len(up)) if layer.bias is None else layer.bias.double()
    biased, spread = layer.bias is not None, False
    for step in steps:
        if isinstance(step, Unknown):
            raise AdapterError(
                f"{fqn}: the adapter cannot be folded: its weight was changed by {step.formula!r}; merge it into the float model "
                "before quantize_ (load_adapter(model, directory, merge=True))"
            )
        if spread and step.axis == 1:
            raise AdapterError(f"{fqn}: the adapter cannot be folded: its weight was changed behind an online Hadamard")
        if isinstance(step, Moved):
            bias, biased = bias + up @ step(down), True
        elif isinstance(step.change, Spread):
            spread = True
        elif step.axis == 1:
            down = step(down)
        else:
            up, bias = step(up), _of_bias(step, bias)
    return Layer(down, up, bias if biased else None, layer.scaling)


def _of_bias(step: Placed, bias: Tensor) -> Tensor:
    return torch.squeeze(step(bias[:, None]), 1)
