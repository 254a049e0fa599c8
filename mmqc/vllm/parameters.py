"""vLLM's parameters of mmqc's tensors: its classes cut them for a rank and place the parts of joined linears.

codes         [N, packed K]          rows by vLLM; columns unpacked, cut and packed again
by group      [N, K/g], [N, K]       rows and columns by vLLM
by output     [N], [N, r]            rows by vLLM
whole         [...], [parts, ...]    one a part
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from mmqc.vllm.shard import Stored


class CodesParameter(ModelWeightParameter):
    """Codes whose bytes hold stretches of a row (ops/pack.py), so that a rank's columns are no stretch of bytes."""

    def __init__(self, *, stored: Stored, **options: Any) -> None:
        self.stored = stored
        super().__init__(output_dim=0, input_dim=1, **options)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """A rank's columns."""
        own = self.stored.columns(loaded_weight, self.tp_rank, self.tp_size)
        assert own.shape == self.data.shape, (own.shape, self.data.shape)
        self.data.copy_(own)


class WholeParameter(PerTensorScaleParameter):
    """What a linear has whatever its outputs: its inputs' scales, the order of its channels."""

    def _load_into_shard_id(self, loaded_weight: Tensor, shard_id: str | int, **options: Any) -> None:
        del options
        part = self.data[self._shard_id_as_int(shard_id)] if self.stacked else self.data
        assert part.shape == loaded_weight.shape, (part.shape, loaded_weight.shape)
        part.copy_(loaded_weight)

    stacked = False


def parameter(stored: Stored, parts: int, loader: Callable[..., Any]) -> Any:
    """A parameter without values; scales are not numbers until they are loaded."""
    shape = (parts, *stored.shape) if stored.whole and parts > 1 else stored.shape
    data = torch.empty(shape, dtype=stored.dtype)
    if stored.dtype == torch.float32:
        data.fill_(torch.nan)
    if stored.whole:
        made = WholeParameter(data=data, weight_loader=loader)
        made.stacked = parts > 1
        return made
    if stored.bits:
        return CodesParameter(stored=stored, data=data, weight_loader=loader)
    if stored.width:
        return GroupQuantScaleParameter(output_dim=0, input_dim=1, data=data, weight_loader=loader)
    return ChannelQuantScaleParameter(output_dim=0, data=data, weight_loader=loader)
