"""Memory for tokens: not much too much, and few sizes."""

from __future__ import annotations

from typing import Any

import torch
from models import tiny_qwen2_vl

import mmqc
from benchmarks.end_to_end.cold_start import prompt, small_model
from mmqc import QuantizedCache
from mmqc.kv.room import room_for


def test_room_for__a_quarter_too_much_at_most_and_never_too_little() -> None:
    rooms = [room_for(n) for n in range(1, 20000)]
    assert rooms == sorted(rooms)
    assert all(n <= room <= max(n + 63, 1.25 * n) for n, room in enumerate(rooms, 1))
    assert len(set(rooms)) < 40, "few sizes, so that few are compiled or recorded"


def test_cache__of_a_fixed_length_keeps_its_places_for_prompts_of_other_sizes() -> None:
    torch.manual_seed(0)
    model: Any = small_model().eval()
    prompts = [prompt(model, grid) for grid in ((16, 8), (8, 8), (12, 12), (4, 4))]
    mmqc.quantize_(model, mmqc.recipes.calibquant(4), prompts[:1], progress=False)
    cache = QuantizedCache(model, max_cache_len=512)

    def filled(inputs: dict[str, torch.Tensor]) -> tuple[set[int], torch.Tensor]:
        cache.reset()
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            step = model(inputs["input_ids"][:, -1:], past_key_values=cache, position_ids=torch.full((3, 1, 1), 60)).logits
        places = [t for layer in cache.packed for segment in layer.segments for t in segment.tensors().values()]
        return {t.data_ptr() for t in places}, step

    first, _ = filled(prompts[0])
    for inputs in prompts[1:]:
        again, step = filled(inputs)
        assert again == first
        fresh = QuantizedCache(model)
        with torch.no_grad():
            model(**inputs, past_key_values=fresh)
            want = model(inputs["input_ids"][:, -1:], past_key_values=fresh, position_ids=torch.full((3, 1, 1), 60)).logits
        torch.testing.assert_close(step, want)


def test_cache__far_too_large_a_place_is_given_up() -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    cache: Any = QuantizedCache(model, mmqc.KVSpec(4), max_cache_len=4096)
    layer = cache.packed[0]

    def room(tokens: int) -> int:
        return layer.with_room(torch.zeros(1, tokens, dtype=torch.int64)).shape[1]

    assert [room(n) for n in (1000, 900, 300, 260)] == [1024, 1024, 1024, 1024]
    assert room(64) == 64
    assert room(65) == room_for(65)
    layer.limit = None
    assert room(65) == 65
