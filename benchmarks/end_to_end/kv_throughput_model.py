"""A decoder of a given shape with random weights, and caches for it that are filled without a prompt.

    shape        layers, hidden width, heads ... of InternVL2.5-8B's decoder, or of any model's config
    filled(...)  a cache of B sequences: so many visual tokens, then text, then room for the tokens to come

Speed and memory do not depend on the weights, nor on what the tokens say.  The blocks are Llama's, which InternLM2's are, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmqc.kv.cache import QuantizedCache
from mmqc.kv.layer import TEXT, VISUAL, Arrival
from mmqc.specs import KVSpec


@dataclass(frozen=True)
class Shape:
    """A decoder's numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """What a transformers config says of its text decoder."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        return cls(
            text.num_hidden_layers,
            text.hidden_size,
            heads,
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
            text.intermediate_size,
            text.vocab_size,
        )


SHAPES = {"internvl2.5-8b": Shape(32, 4096, 32, 8, 128, 14336, 92553), "tiny": Shape(2, 64, 4, 2, 16, 128, 100)}


def shape_of(name: str) -> Shape:
    """A shape by its name, or that of a model directory.

    Raises:
        ValueError: it is neither.
    """
    if name in SHAPES:
        return SHAPES[name]
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name!r} is no model directory, and no shape: {', '.join(SHAPES)}")
    from transformers import AutoConfig

    return Shape.of(AutoConfig.from_pretrained(name))


def decoder(shape: Shape, device: torch.device, dtype: torch.dtype, longest: int) -> Any:
    """Random weights, made where they are used."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width,
        intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary,
        max_position_embeddings=longest,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).eval()
    model = model.to(dtype)
    model.to_empty(device=device)
    for p in model.parameters():
        p.data.normal_(0, 0.02) if p.dim() > 1 else p.data.fill_(1)
    rope: Any = model.model.rotary_emb
    model.model.rotary_emb = type(rope)(config=config).to(device)  # its frequencies were on the meta device
    return model


def filled(model: Any, bits: int, batch: int, visual: int, text: int, room: int, *, dynamic: bool = False) -> Any:
    """A cache with ``visual`` and ``text`` tokens of random values in each of ``batch`` sequences, and room for ``room`` more.

    Args:
        model: of ``decoder``.
        bits: of visual tokens; 16 is transformers' own cache in the model's dtype.
        batch: sequences.
        visual: tokens of each.
        text: tokens of each.
        room: tokens of each that are to come.
        dynamic: at 16 bits, transformers' ``DynamicCache``, which grows by copying, and not its ``StaticCache``.
    """
    config, length = model.config, visual + text
    head = (config.num_key_value_heads, length, config.head_dim)
    if bits == 16:
        config._attn_implementation = "sdpa"
        return _plain(model, batch, head, length + room, dynamic)
    spec = KVSpec(bits, shrink_keys=0.6, shrink_values=0.6, tau=((1, 2),)) if bits == 1 else KVSpec(bits)
    cache = QuantizedCache(model, spec, max_cache_len=length + room)
    kinds = torch.full((1, length), VISUAL, dtype=torch.uint8, device=model.device)
    kinds[:, visual:] = TEXT
    for layer in cache.packed:
        k, v = _random((1, *head), model), _random((1, *head), model)
        layer.lazy_initialization(k, v)
        layer.store(k, v, Arrival.of(kinds))
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    return cache


def _plain(model: Any, batch: int, head: tuple[int, int, int], longest: int, dynamic: bool) -> Any:
    from transformers import DynamicCache, StaticCache

    if dynamic:
        cache = DynamicCache(config=model.config)
        for i in range(model.config.num_hidden_layers):
            cache.update(_random((batch, *head), model), _random((batch, *head), model), i)
        return cache
    cache = StaticCache(config=model.config, max_cache_len=longest)
    cache.early_initialization(batch, head[0], head[2], model.dtype, model.device)
    for layer in cache.layers:
        states: Any = layer
        for t in (states.keys, states.values):
            t[:, :, : head[1]].normal_()
        states.cumulative_length.fill_(head[1])
    return cache


def _random(size: tuple[int, ...], model: Any) -> Tensor:
    return torch.randn(size, device=model.device, dtype=model.dtype)


def cache_bytes(cache: Any) -> int:
    """Bytes of the cache's tensors."""
    if isinstance(cache, QuantizedCache):
        found = cache.sizes()
        return found["visual"] + found["text"]
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
