"""A quantized cache in host memory: the same tokens, and every layer there when it is not its turn."""

import pytest
import torch
from cache_steps import padded, steps
from models import tiny_qwen2_vl

from mmqc import KVSpec, QuantizedCache
from mmqc.kv.layer import PackedLayer

SPECS = [KVSpec(2), KVSpec(1, text_bits=8, text_window=3, text_block=8, tau=((1, 2),))]


@pytest.mark.parametrize("spec", SPECS, ids=["packed", "text rounded, too"])
@torch.no_grad()
def test_offload__a_layer_is_there_only_in_its_turn(monkeypatch, spec: KVSpec) -> None:
    """Where host and device are one, a layer that is away holds NaN."""
    model, batch = tiny_qwen2_vl()
    batch = padded(batch)
    away: dict[int, list[torch.Tensor]] = {}
    order: list[tuple[str, int]] = []

    def offload(layer: PackedLayer) -> None:
        order.append(("offload", cache.layers.index(layer)))
        if id(layer) not in away:
            away[id(layer)] = [t.clone() for t in layer.tensors()]
            for t in layer.tensors():
                if t.dim() > 1:
                    t.fill_(torch.nan if t.is_floating_point() else 77)

    def prefetch(layer: PackedLayer) -> None:
        order.append(("prefetch", cache.layers.index(layer)))
        if id(layer) in away:
            for t, kept in zip(layer.tensors(), away.pop(id(layer)), strict=True):
                t.copy_(kept)

    tokens, mask = torch.randint(10, 400, (2, 8)), batch["attention_mask"]
    plain, cache = QuantizedCache(model, spec), QuantizedCache(model, spec, offloading=True)
    want = model(**batch, past_key_values=plain, use_cache=True).logits, steps(model, plain, tokens[:, :5], mask)
    monkeypatch.setattr(PackedLayer, "offload", offload)
    monkeypatch.setattr(PackedLayer, "prefetch", prefetch)
    got = model(**batch, past_key_values=cache, use_cache=True).logits, steps(model, cache, tokens[:, :5], mask)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert order == [(what, i) for _ in range(6) for i in range(2) for what in ("prefetch", "offload")]
    assert len(away) == 2
    plain.crop(-2)
    cache.crop(-2)
    seen = torch.cat((mask, mask.new_ones(2, 3)), 1)
    assert torch.equal(steps(model, cache, tokens[:, 3:], seen), steps(model, plain, tokens[:, 3:], seen))


@torch.no_grad()
def test_offload__generate_and_what_moves() -> None:
    model, batch = tiny_qwen2_vl()
    more = {"max_new_tokens": 5, "do_sample": False}
    want = model.generate(**batch, **more, past_key_values=QuantizedCache(model, SPECS[1]))
    cache = QuantizedCache(model, SPECS[1], max_cache_len=200, offloading=True)
    assert torch.equal(model.generate(**batch, **more, past_key_values=cache), want)
    assert not cache.is_compileable
    for layer in cache.packed:
        layer.move(torch.device("meta"))
        moved = [t for t in layer.tensors() if t.is_meta]
        assert [t.dim() for t in layer.tensors() if not t.is_meta] == [1, 1], "the counts stay"
        assert sum(t.numel() for t in moved) == sum(t.numel() for t in layer.tensors() if t.dim() > 1)


@pytest.mark.gpu
@torch.no_grad()
def test_offload__on_cuda_only_two_layers_are_there() -> None:
    model, batch = tiny_qwen2_vl()
    model, batch = model.cuda(), {k: v.cuda() for k, v in batch.items()}
    more = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    for spec in SPECS:
        want = model.generate(**batch, **more, past_key_values=QuantizedCache(model, spec))
        cache = QuantizedCache(model, spec, offloading=True)
        assert torch.equal(model.generate(**batch, **more, past_key_values=cache), want)
        torch.cuda.synchronize()
        assert [layer.keys.device.type for layer in cache.packed].count("cuda") <= 1, "the next one's turn has been prepared"
