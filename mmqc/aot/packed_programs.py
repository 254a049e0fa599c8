"""Prefill and decode of a package whose cache holds visual tokens packed (mmqc/kv/layer.py), text tokens as they are.

    prefill   ..., key_i, value_i [B, H, 1 + T, D]      -> logits, visual_count [B], and by layer
                  k_words_i [B, H, R, D]  v_words_i [B, H, D, R]  k_scale_i  k_offset_i  v_scale_i  v_offset_i  (ops/kv_pack.py)
    decode    one token a row, all of that              -> logits                 writes key_i, value_i at 1 + its text tokens

The packed part never changes after the prompt: it is a result of prefill and an input of decode.  The text part is the caller's,
with room T for the text tokens of the prompt and the answer; place 0 takes what is not stored.  R words hold as many tokens as
the prompt is long: how many of them are visual is a value, ``visual_count``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mmqc.aot.programs import (
    SHORT,
    Decode,
    Inputs,
    Prefill,
    Seam,
    StepError,
    cache_shape,
    deltas_of,
    find_positions,
    find_seam,
    logits_of,
    place_of,
    watched_positions,
)
from mmqc.aot.step_batches import STEPS, Steps, next_token
from mmqc.config import KVSpec
from mmqc.kv.cache import SPEC, QuantizedCache, check_spec, decoder_config
from mmqc.kv.layer import PADDING, TEXT, VISUAL, Arrival, PackedLayer, Segment, Shared
from mmqc.kv.layer_types import kinds_of
from mmqc.nn.modality import attached
from mmqc.versions import cache_name

COUNT = "visual_count"
PARTS = tuple(f.name for f in fields(Segment) if f.name != "count")
_NONE = torch.empty(0)
NOTHING = Arrival(_NONE, _NONE, _NONE, _NONE, _NONE, 0, 0)


def _kinds(model: nn.Module, inputs: Inputs) -> Tensor:
    """What each token of a prompt is: uint8 [B, L]."""
    context = attached(model)
    assert context is not None
    visual = context.find(model, (), {"input_ids": inputs["input_ids"]})
    kinds = torch.where(visual, VISUAL, TEXT)
    return torch.where(inputs["attention_mask"] > 0, kinds, PADDING).to(torch.uint8)


class GivenLayer(PackedLayer):
    """A layer whose tensors are the caller's; nothing about it depends on a value."""

    def __init__(self, spec: KVSpec, tau: tuple[float, float], model: nn.Module, keys: Tensor, values: Tensor) -> None:
        super().__init__(spec, tau, Shared(attached(model)), False, keys.shape[2])
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.batch_size, self.num_heads, _, self.k_head_dim = keys.shape
        self.v_head_dim = values.shape[3]
        self.is_initialized = True

    def get_seq_length(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tokens before this call."""
        return 0

    def put(self, place: Tensor, k: Tensor, v: Tensor) -> None:
        """Tokens [B, H, L, D] at ``place`` int64 [B, L] of the text part."""
        assert isinstance(self.keys, Tensor)
        assert isinstance(self.values, Tensor)
        self.keys.scatter_(2, place[:, None, :, None].expand_as(k), k)
        self.values.scatter_(2, place[:, None, :, None].expand_as(v), v)


class PromptLayer(GivenLayer):
    """Takes a prompt."""

    kinds: Tensor

    def store(self, k: Tensor, v: Tensor, arrival: Any, moment: Tensor | None = None) -> None:
        """Visual tokens become the layer's one segment, text goes to its places."""
        del arrival, moment
        visual, text, spec = self.kinds == VISUAL, self.kinds == TEXT, self.spec
        count = visual.sum(1).to(torch.int32)
        where = (torch.argsort(visual.logical_not().to(torch.uint8), dim=1, stable=True), count, spec.bits)
        parts = (
            *torch.ops.mmqc.kv_pack(k, *where, spec.keys, spec.shrink_keys, False),
            *torch.ops.mmqc.kv_pack(v, *where, spec.values, spec.shrink_values, True),
        )
        self.segments = [Segment(**dict(zip(PARTS, parts, strict=True)), count=count)]
        self.put(text.cumsum(1) * text, k, v)
        self.empty = False


class TokenLayer(GivenLayer):
    """Takes one token a row."""

    position: Tensor

    def get_seq_length(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The token's place in the text."""
        return self.position[0]

    def append(self, k: Tensor, v: Tensor) -> None:
        """The count of text tokens includes this one."""
        self.put(self.text_count.long()[:, None], k, v)


class PackedPrefill(Prefill):
    """A prompt: visual tokens packed, text into the caller's tensors."""

    def __init__(self, model: nn.Module, seam: Seam | None, layers: int, told: nn.Module | None, spec: KVSpec) -> None:
        super().__init__(model, seam, layers, told)
        self.spec = spec

    def cache(self, keys: Sequence[Tensor], values: Sequence[Tensor], given: Inputs) -> Any:
        """Layers for the prompt."""
        kinds, layers = _kinds(self.model, given), []
        torch._assert_async(((kinds == TEXT).sum(1) < keys[0].shape[2]).all(), SHORT)
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            layer = PromptLayer(self.spec.of_layer(i), self.spec.tau_of(i), self.model, k, v)
            layer.kinds = kinds
            layer.shared.arrival = NOTHING  # already looked at
            layers.append(layer)
        return Cache(layers=layers)

    def stored(self, cache: Any) -> dict[str, Tensor]:
        """The packed part."""
        segments = [layer.segments[0] for layer in cache.layers]
        parts = {f"{name}_{i}": getattr(s, name) for i, s in enumerate(segments) for name in PARTS}
        return {COUNT: segments[0].count, **parts}


class PackedDecode(Decode):
    """One token a row, over both parts."""

    def __init__(self, model: nn.Module, layers: int, axes: bool, spec: KVSpec) -> None:
        super().__init__(model, layers, axes)
        self.spec = spec

    def cache(self, keys: Sequence[Tensor], values: Sequence[Tensor], inputs: Inputs) -> Any:
        """Layers for the token."""
        count = inputs[COUNT]
        text = (inputs["attention_mask"].sum(-1) - count).to(torch.int32)
        torch._assert_async((text < keys[0].shape[2]).all(), SHORT)
        layers = []
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            layer = TokenLayer(self.spec.of_layer(i), self.spec.tau_of(i), self.model, k, v)
            layer.text_count, layer.position, layer.empty = text, inputs["cache_position"], False
            layer.segments = [Segment(**{name: inputs[f"{name}_{i}"] for name in PARTS}, count=count)]
            layers.append(layer)
        return Cache(layers=layers)


def steps_of(model: nn.Module, batch: Inputs) -> Steps:
    """The programs for the cache with which the model generates.

    Raises:
        StepError: the model cannot be split so.
    """
    parts = (model, find_seam(model, batch), cache_shape(model, batch), find_positions(model, batch))
    spec = getattr(model, SPEC, None)
    return Steps(*parts) if spec is None else PackedSteps(*parts, spec)


@dataclass
class PackedSteps(Steps):
    """The three programs of a model with a ``kv`` config, compared with the model and its own quantized cache."""

    spec: KVSpec = field(default_factory=KVSpec)

    def __post_init__(self) -> None:
        text = decoder_config(self.model)
        kinds = kinds_of(text)
        if set(kinds) != {"full_attention"}:
            raise StepError(f"a packed cache has full attention in every layer, this one has {sorted(set(kinds))}")
        if self.spec.text_bits < 16:
            raise StepError("a package stores text in the model's precision: quantize the cache with text_bits=16")
        if self.spec.rounding != "nearest":
            raise StepError(
                "a package rounds keys to the nearest code, not for the queries that calibration saw: quantize the cache with "
                'rounding="nearest", at 1 bit for some accuracy, or with 2 bits'
            )
        check_spec(self.spec, text)

    def modules(self) -> dict[str, nn.Module]:
        """By name of the program."""
        layers, vision = len(self.cache.keys), {n: m for n, m in super().modules().items() if n == "vision"}
        prefill = PackedPrefill(self.model, self.seam, layers, self.told, self.spec)
        return {**vision, "prefill": prefill, "decode": PackedDecode(self.model, layers, self.told is None, self.spec)}

    def described(self) -> dict[str, str]:
        """For whoever allocates the cache: which tokens of ``input_ids`` need no room in it."""
        context = attached(self.model)
        return {"packed": ",".join(map(str, context.visual_token_ids if context else ()))}

    def expected(self, batch: Inputs) -> list[Tensor]:
        """By the model, a step at a time."""
        cache, mask = QuantizedCache(self.model, self.spec), batch["attention_mask"]
        with watched_positions(self.told) as positions:
            out = self.model(**batch, **{cache_name(): cache}, use_cache=True)
        logits, deltas = [logits_of(out)[:, -1]], deltas_of(self.model, out, positions, mask)
        for step in range(STEPS):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            out = self.model(
                input_ids=next_token(batch, step),
                attention_mask=mask,
                position_ids=place_of(mask, deltas, self.told is None),
                use_cache=True,
                **{cache_name(): cache},
            )
            logits.append(logits_of(out)[:, -1])
        return logits
