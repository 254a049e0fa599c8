from types import SimpleNamespace

import pytest
import torch
from models import tiny_qwen2_vl
from torch import nn
from transformers.cache_utils import LinearAttentionLayer, StaticCache, StaticLayer

from mmqc.compiler import kept_cache
from mmqc.compiler.kept_cache import KeptCaches, attends, check_lengths, entries, has_memory, longest, shape_of_all, tensors
from mmqc.kv.room import TIMES, room_for


def ready(caches: KeptCaches, model: nn.Module, tokens: int, batch: int = 1, **more: bool) -> StaticCache:
    config = model.config.get_text_config(decoder=True)
    return caches.ready(model, StaticCache(config=config, max_cache_len=tokens), batch, tokens, **{"keep": True, **more})


def test_kept__is_used_again_while_it_has_room_and_not_too_much() -> None:
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()
    first = ready(caches, model, 300)
    assert first.get_max_length() == room_for(300)
    first.layers[0].keys.fill_(1)
    for tokens in (20, room_for(300) // TIMES, room_for(300)):
        again = ready(caches, model, tokens)
        assert (again is first) == (room_for(300) <= TIMES * room_for(tokens)), tokens
        if again is first:
            assert not again.layers[0].keys.any(), "empty"
        first = ready(caches, model, 300)
    longer = ready(caches, model, room_for(300) + 1)
    assert longer is not first
    assert len(caches.caches) == 1


def test_kept__one_for_each_number_of_prompts_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()
    found = [ready(caches, model, 100, batch) for batch in (1, 2, 3)]
    assert all(ready(caches, model, 100, batch) is cache for batch, cache in enumerate(found, 1))
    assert [cache.layers[0].keys.shape[0] for cache in found] == [1, 2, 3]
    monkeypatch.setattr(kept_cache, "KEPT", sum(t.nbytes for t in tensors(found[0])))
    last = ready(caches, model, 100, 4)
    assert [kept.cache for kept in caches.caches.values()] == [last]


def test_kept__not_what_the_caller_gets() -> None:
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()
    assert ready(caches, model, 100, keep=False) is not ready(caches, model, 100, keep=False)
    assert not caches.caches


def test_layers_that_slide__keep_their_window() -> None:
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()
    config = model.config.get_text_config(decoder=True)
    config.layer_types = ["sliding_attention", *["full_attention"] * (config.num_hidden_layers - 1)]
    config.sliding_window, config.use_sliding_window = 16, True
    cache = ready(caches, model, 200)
    assert [layer.keys.shape[2] for layer in cache.layers][:2] == [16, room_for(200)]
    assert ready(caches, model, 190) is cache, "its room is that of the layers that do not slide"
    assert torch.equal(cache.layers[0].keys, torch.zeros_like(cache.layers[0].keys))


def test_kept__memory_that_only_a_forward_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()

    def differ() -> None:
        raise RuntimeError("'head_dim' is a per-layer attribute")

    monkeypatch.setattr(model, "_get_static_cache_init_shape", differ)
    first = ready(caches, model, 100)
    assert not has_memory(first)
    for i, layer in enumerate(first.layers):
        layer.lazy_initialization(*torch.ones(2, 1, 2, 0, 8 * (i + 1)))
    assert has_memory(ready(caches, model, 100))
    assert ready(caches, model, 100) is first


def test_kept__heads_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions of transformers give lists where layers differ."""
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()
    (heads, width), layers = model._get_static_cache_init_shape(), model.config.get_text_config(decoder=True).num_hidden_layers
    widths = [width * (1 + i % 2) for i in range(layers)]
    monkeypatch.setattr(model, "_get_static_cache_init_shape", lambda: (heads, widths))
    assert shape_of_all(model) == (heads, tuple(widths))
    assert entries((heads, tuple(widths)), layers) == heads * sum(widths)
    assert entries((heads, width), layers) == layers * heads * width
    cache = ready(caches, model, 100)
    assert [layer.keys.shape[-1] for layer in cache.layers] == widths
    assert ready(caches, model, 90) is cache


def test_has_memory__of_linear_attention_is_a_state() -> None:
    linear, cache = LinearAttentionLayer(), SimpleNamespace(layers=[])
    cache.layers = [linear, StaticLayer(max_cache_len=8)]
    cache.layers[1].lazy_initialization(*torch.ones(2, 1, 2, 0, 4))
    assert not has_memory(cache)
    assert not attends(cache)
    assert longest(cache) == 8
    linear.lazy_initialization(torch.ones(1, 4, 3))
    assert has_memory(cache)
    assert any(t.shape == (1, 4, 3) for t in tensors(cache))


def test_check_lengths__every_layer_has_the_prompts_tokens() -> None:
    (model, _), caches = tiny_qwen2_vl(), KeptCaches()
    cache = ready(caches, model, 100)
    keys = torch.zeros(1, *cache.layers[0].keys.shape[1:])[:, :, :9]
    for layer in range(len(cache.layers)):
        cache.update(keys, keys, layer)
    check_lengths(model, cache, 9)
    cache.update(keys[:, :, :4], keys[:, :, :4], 1)  # as cross-attention of BLIP does
    with pytest.raises(ValueError, match="stored 13 tokens in its static cache for a prompt of 9"):
        check_lengths(model, cache, 9)
