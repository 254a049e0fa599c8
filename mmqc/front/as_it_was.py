"""A forward that is run to be watched leaves no trace on tensors: what it writes to is put back.

    with as_it_was(model, inputs): model.forward(**inputs)

Why:   a model may count its calls, or keep a cache, in a buffer or in a tensor that it is given; in front of a call it has not
       been called.  Of an input that it writes to nothing can be computed in front, either.
What:  buffers, but for those of quantized modules, which are codes and scales and never written, and tensors among the inputs.
       A cache of transformers is a copy already (find.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@contextmanager
def as_it_was(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[list[Tensor]]:
    """Put back what is written to meanwhile, also when an error is on its way; it is listed behind the ``with``."""
    kept = [(tensor, tensor._version, tensor.detach().clone()) for tensor in _may_be_written(model, inputs)]
    written: list[Tensor] = []
    try:
        yield written
    finally:
        changed = [(tensor, value) for tensor, version, value in kept if tensor._version != version]
        with torch.no_grad():
            for tensor, value in changed:
                tensor.copy_(value)
        written += [tensor for tensor, _ in changed]


def _may_be_written(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Buffers and inputs, each once."""
    plain = (module for module in model.modules() if not type(module).__module__.startswith("mmqc."))
    buffers = (buffer for module in plain for buffer in module.buffers(recurse=False))
    values = [value for value in inputs.values() if not hasattr(value, "get_seq_length")]
    given = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return list({id(tensor): tensor for tensor in (*buffers, *given) if not tensor.is_inference()}.values())
