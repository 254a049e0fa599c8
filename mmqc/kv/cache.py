"""A transformers cache whose visual tokens are packed to 8, 4, 2 or 1 bits (CalibQuant, arXiv:2502.14882).

    mmqc.quantize_(model, mmqc.recipes.calibquant(bits=1), calibration=batches)
    model.generate(**inputs)                                                        # makes such a cache by itself
    cache = mmqc.QuantizedCache(model)                                              # or: one to keep, for several turns
    model.generate(**inputs, past_key_values=cache)

Layers with full attention are packed (layer.py); sliding windows stay transformers' own layers, in the model's dtype.
Which tokens are visual comes from the model's ``ModalityContext``.
"""

# transformers declares a layer's tensors as `Tensor | None`, and index tensors as LongTensor.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache

from mmqc.config import ConfigError, KVSpec
from mmqc.kv import attention as _registers  # noqa: F401
from mmqc.kv.layer import ATTENTION, TEXT, VISUAL, PackedLayer, Shared
from mmqc.kv.layer_types import kinds_of, layer_types
from mmqc.nn.modality import ModalityContext, attached, visual_token_ids
from mmqc.ops.kv_token_attention import check_tokens

SPEC = "_mmqc_kv"


def prepare(model: nn.Module) -> ModalityContext:
    """Let ``model`` read packed caches: its decoder attends through our function, and its visual tokens are known.

    With other caches it computes what it did with transformers' sdpa attention.

    Raises:
        ConfigError: the model's config names no decoder, or a decoder whose cache cannot be packed.
    """
    text = decoder_config(model)
    text._attn_implementation = ATTENTION
    context = attached(model)
    if context is None:
        context = ModalityContext.attach(model, visual_token_ids(model))
        context.text_only = not context.visual_token_ids
    return context


def decoder_config(model: nn.Module) -> Any:
    """The config of the text decoder."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is no transformers model: its KV cache cannot be quantized")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(model).__name__} is an encoder-decoder: its KV cache cannot be quantized")
    text = config.get_text_config(decoder=True)
    kinds = set(kinds_of(text))
    if "full_attention" not in kinds:
        raise ConfigError(f"{type(model).__name__} has no layer with full attention but {sorted(kinds)}: nothing to pack")
    return text


class QuantizedCache(Cache):
    """A packed KV cache for one request (a batch of sequences).

    ``update`` stores nothing: it returns handles (``Cached``), and the attention function writes the new tokens.

    Args:
        model: a model that ``quantize_`` gave a ``kv`` config; or any, with ``spec``.
        spec: how to store visual tokens; None takes what ``quantize_`` found.
        max_cache_len: tokens to make room for, visual ones included; None lets the room for text grow (a compiled decode
            step must not run out of it).
        offloading: keep every layer but the one whose turn it is, and the next one, in host memory (transformers'
            ``OffloadedStaticCache``); sliding windows stay.  Such a cache is not compiled.

    Raises:
        ConfigError: there is no spec, or it has another number of layers than the model.
    """

    def __init__(
        self, model: nn.Module, spec: KVSpec | None = None, *, max_cache_len: int | None = None, offloading: bool = False
    ) -> None:
        spec = getattr(model, SPEC, None) if spec is None else spec
        if spec is None:
            raise ConfigError("this model has no kv config: pass spec=mmqc.KVSpec(...), or quantize_ it with calibquant()")
        text = decoder_config(model)
        kinds = layer_types(text)
        check_spec(spec, text)
        self.shared = Shared(prepare(model), offloads=offloading)
        self.spec = spec
        first = kinds_of(text).index("full_attention")
        room = max_cache_len or getattr(text, "max_position_embeddings", 4096)
        layers = [
            PackedLayer(spec.of_layer(i), spec.tau_of(i), self.shared, i == first, max_cache_len)
            if kind == "full_attention"
            else STATIC_LAYER_TYPE_MAPPING[kind](**kwargs, max_cache_len=room)
            for i, (kind, kwargs) in enumerate(kinds)
        ]
        super().__init__(layers=layers)
        self.offloading = offloading
        self.stream: Any = None

    @property
    def packed(self) -> list[PackedLayer]:
        """The layers that pack."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, but for offloading: a packed layer leaves when its attention has stored the tokens."""
        if self.offloading:
            self._fetch(layer_idx, key_states.device)
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states, *args, **kwargs)

    def _fetch(self, index: int, device: torch.device) -> None:
        """This layer to the device, and the next one behind the host's back."""
        layer = self.layers[index]
        if not isinstance(layer, PackedLayer):
            return
        at = self.packed.index(layer)
        following = self.packed[(at + 1) % len(self.packed)]
        if device.type == "cpu":
            layer.prefetch()
            return
        current = torch.cuda.current_stream(device)
        self.stream = self.stream or torch.cuda.Stream(device)
        current.wait_stream(self.stream)
        layer.prefetch()
        self.stream.wait_stream(current)  # what left earlier has arrived in host memory, and nobody reads its old place
        with torch.cuda.stream(self.stream):
            following.prefetch()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: ``-n`` removes n, a positive number is the length to keep (as in transformers).

        Visual tokens that stay keep the range they were packed with.
        """
        if tokens_to_remove == 0:  # asked at every step by a loop that stops late: must not wait for the device
            return
        total = int(self.packed[0].get_seq_length())
        length = tokens_to_remove if tokens_to_remove > 0 else total + tokens_to_remove
        if length >= total:
            return
        if length <= 0:
            self.reset()
            return
        if len(self.packed) < len(self.layers):
            raise ValueError(
                "a cache with sliding windows cannot be cropped: what the window left behind is gone; go back to a "
                "copy.deepcopy of the cache from before"
            )
        text, visual = self._removed(length, total)
        for layer in self.packed:
            layer.remove(length, text, visual)
        self.shared.history = [(s, k[:, : length - s]) for s, k in self.shared.history if s < length]

    def _removed(self, length: int, total: int) -> tuple[Tensor, list[Tensor]]:
        """How many text tokens, and visual ones of each segment, lie behind ``length``."""
        batch, device = self.packed[0].batch_size, self.packed[0].text_count.device
        text = torch.full((batch,), total - length, device=device)
        visual = []
        for start, kinds in self.shared.history:
            gone = kinds[:, max(0, length - start) :] if length < start + kinds.shape[1] else kinds[:, :0]
            text -= (gone != TEXT).sum(1)
            if bool((kinds == VISUAL).any()):
                visual.append((gone == VISUAL).sum(1))
        return text, visual

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.shared.arrival, self.shared.history = None, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] is."""
        super().reorder_cache(beam_idx)
        self._rows(lambda kinds: kinds[beam_idx.to(kinds.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda kinds: kinds.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows alone."""
        super().batch_select_indices(indices)
        self._rows(lambda kinds: kinds[indices.to(kinds.device)])

    def _rows(self, change: Any) -> None:
        self.shared.history = [(start, change(kinds)) for start, kinds in self.shared.history]

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedCache:
        """A copy of the state for the same model: a prefix to go on from more than once."""
        import copy

        memo[id(self.shared.context)], memo[id(self.stream)] = self.shared.context, self.stream
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new

    def sizes(self) -> dict[str, int]:
        """Bytes by part: "visual" (words, scales, counts), "text", and "visual_plain", the same visual tokens in 16 bits."""
        out = {"visual": 0, "text": 0, "visual_plain": 0}
        for layer in self.packed:
            rounded = [] if layer.older is None else layer.older.tensors().values()
            out["text"] += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values, *rounded))
            for s in layer.segments:
                out["visual"] += sum(t.numel() * t.element_size() for t in s.tensors().values())
                tokens = int(s.count.sum())
                out["visual_plain"] += 2 * tokens * layer.num_heads * (layer.k_head_dim + layer.v_head_dim)
        return out


def head_width(text: Any) -> int:
    """Channels of a head of the decoder with the config ``text``."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def check_spec(spec: KVSpec, text: Any) -> None:
    """Raise unless the decoder with the config ``text`` can have such a cache: tau for its layers, blocks for its heads."""
    layers = text.num_hidden_layers
    if len(spec.tau) > 1 and len(spec.tau) != layers:
        raise ConfigError(f"KVSpec.tau has {len(spec.tau)} pairs for a model of {layers} layers: one, or one for each")
    if spec.layer_bits:
        if len(spec.layer_bits) != layers:
            raise ConfigError(f"KVSpec.layer_bits has {len(spec.layer_bits)} numbers for a model of {layers} layers: one for each")
        packed = [bits for bits, kind in zip(spec.layer_bits, kinds_of(text), strict=False) if kind == "full_attention"]
        if sum(packed) > spec.bits * len(packed):
            raise ConfigError(
                f"KVSpec.layer_bits {spec.layer_bits} are more than bits = {spec.bits} on average of the packed layers"
            )
    if spec.text_bits < 16:
        try:
            check_tokens(head_width(text), spec.text_bits, spec.text_block)
        except ValueError as error:
            raise ConfigError(f"KVSpec.text_block does not fit this model: {error}") from error
