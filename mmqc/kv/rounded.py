"""A transformers cache whose keys and values are stored in ResQ's two precisions: a token's codes, not the model's dtype.

    mmqc.quantize_(model, mmqc.recipes.resq(), calibration=batches)
    model.generate(**inputs, past_key_values=mmqc.RoundedCache(model))

Shapes:  keys, values uint8 [B, H_kv, T, row_bytes] a layer (ops/kv_rows.py), U_C already in the keys
Why:     a token is rounded alone (rounding.py), so what attention rounds when it reads can be rounded once, when it comes:
         4 bits with one eighth in 8 take 88 bytes of a head's 256, for heads of 128 channels.
Reading: a decode step attends to the rows as they are (ops/kv_rows_attention.py).  Where there is more than one query, a mask or a
         part in fewer than 4 bits, a layer's rows are written out in the model's dtype, one layer at a time.
Layers with sliding windows are transformers' own; their keys and values are rounded when they are read.
"""

# transformers declares a layer's tensors as `Tensor | None`.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportReturnType=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from mmqc.config import ConfigError
from mmqc.kv.layer_types import kinds_of, layer_types
from mmqc.kv.rounding import NAME, Arriving, KVRounder, decoder_config
from mmqc.ops.kv_rows import from_rows, to_rows

Pair = tuple[Tensor, Tensor]


class RowsLayer(DynamicLayer):
    """Tokens as rows of bytes; everything but storing and reading them is as for any tensor of tokens."""

    plain: int = 0  # bytes of a head's token in 16 bits

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Handles for the attention function, which knows U_C and the bits."""
        del args, kwargs
        return Arriving(self, key_states), Arriving(self, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No tokens."""
        del value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        empty = torch.tensor([], dtype=torch.uint8, device=self.device)
        self.keys, self.values, self.is_initialized = empty, empty.clone(), True

    def append(self, rounder: KVRounder, k: Tensor, v: Tensor) -> None:
        """Round new tokens [B, H, L, D], which are behind RoPE, and keep their rows."""
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        parts, self.plain = (rounder.widths, rounder.bits), 2 * (k.shape[-1] + v.shape[-1])
        self.keys = torch.cat((self.keys, to_rows(*rounder.key_codes(k), *parts)), -2)
        self.values = torch.cat((self.values, to_rows(*rounder.codes(v), *parts)), -2)

    def written_out(self, rounder: KVRounder, dtype: torch.dtype) -> Pair:
        """All keys, turned by U_C, and all values."""
        keys, values = (rounder.values(*from_rows(rows, rounder.widths, rounder.bits), dtype) for rows in (self.keys, self.values))
        return keys, values


class RoundedCache(Cache):
    """Keys and values of one request (a batch of sequences) as ``quantize_`` rounds them.

    Args:
        model: to which ``quantize_`` gave a ``kv_rounding``.

    Raises:
        ConfigError: the model rounds no keys and values, or no layer of it has full attention.
    """

    def __init__(self, model: nn.Module) -> None:
        if not any(isinstance(m, KVRounder) for m in model.modules()):
            raise ConfigError(
                f"{type(model).__name__} rounds no keys and values: quantize_ it with a kv_rounding, e.g. recipes.resq()"
            )
        text = decoder_config(model)
        if text._attn_implementation != NAME:
            raise ConfigError(
                f"this model attends by {text._attn_implementation!r}, which cannot read rounded tokens; set {NAME!r} back"
            )
        kinds = layer_types(text)
        if "full_attention" not in kinds_of(text):
            raise ConfigError(f"{type(model).__name__} has no layer with full attention but {sorted(set(kinds_of(text)))}")
        layers = [RowsLayer() if kind == "full_attention" else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kw) for kind, kw in kinds]
        super().__init__(layers=layers)

    def sizes(self) -> dict[str, int]:
        """Bytes of the rows, and of the same tokens in 16 bits ("plain")."""
        rows = [layer for layer in self.layers if isinstance(layer, RowsLayer) and layer.is_initialized]
        stored = sum(layer.keys.numel() + layer.values.numel() for layer in rows)
        return {"rows": stored, "plain": sum(layer.plain * layer.keys.shape[:-1].numel() for layer in rows)}
