"""The calls of a decoder's attention function, as a place to observe (calibration/observe.py).

    with observe(model, {AttentionCalls("sdpa"): statistic}): ...      update(attention module, query, key, softmax scale)

Shapes:  query [B, H_q, L, D]   key [B, H, L, D], behind RoPE, or what a cache hands over in its place
How:     transformers looks the function up by a name in the decoder's config.  Every observation registers a name of its own, for
         a function that shows the operands to its statistic and computes as the given one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmqc.calibration.observe import Update


@dataclass(frozen=True)
class AttentionCalls:
    """``function`` is the name, known to transformers, of the attention function that computes meanwhile."""

    function: str

    @contextmanager
    def watch(self, model: Any, update: Update) -> Iterator[None]:
        """For the length of a ``with`` block, the decoder attends through an observed function."""
        from transformers import AttentionInterface, AttentionMaskInterface

        attend = AttentionInterface()[self.function]

        def observed(
            module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, scaling: float | None = None, **kwargs: Any
        ) -> Any:
            update(module, query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
            return attend(module, query, key, value, mask, scaling=scaling, **kwargs)

        config, name = model.config.get_text_config(decoder=True), f"mmqc_observed_{id(observed)}"
        before = config._attn_implementation
        AttentionMaskInterface.register(name, AttentionMaskInterface()[self.function])
        AttentionInterface.register(name, observed)
        try:
            config._attn_implementation = name
            yield
        finally:
            config._attn_implementation = before
            del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
