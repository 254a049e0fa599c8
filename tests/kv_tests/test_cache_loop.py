"""mmqc.compiled_loop with a quantized cache: eager tokens, one graph of a step, a cache that is used again."""

import random
from typing import Any

import pytest
import torch
from counted_graphs import counting
from models import tiny_qwen2_vl
from often import often
from prompts import drawn
from transformers import CompileConfig

import mmqc
from mmqc import KVSpec, QuantizedCache
from mmqc.compiler.record import collect_records
from mmqc.kv.generate import attach

EAGER = {"do_sample": False, "disable_compile": True}
SPECS = {
    "packed": KVSpec(2, tau=((1, 2),), layer_bits=(1, 2)),
    "text rounded, too": KVSpec(2, text_bits=4, text_window=3, text_block=8),
}


def loop(backend: Any) -> dict[str, Any]:
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    return {"do_sample": False, "compile_config": config, "custom_generate": mmqc.compiled_loop}


@pytest.mark.parametrize("name", often(SPECS, next(iter(SPECS))))
def test_compiled_loop__one_graph_at_any_length_and_in_every_call(name: str) -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1)
    attach(model, SPECS[name])
    backend, graphs = counting()
    for tokens in (12, 12, 7):
        want = model.generate(**batch, **EAGER, max_new_tokens=tokens)
        assert torch.equal(model.generate(**batch, **loop(backend), max_new_tokens=tokens), want)
        assert len(graphs) == 1, "no graph break (fullgraph), and none for another length or call"
    (kept,) = model._mmqc_loop.packed.values()
    places = [t.data_ptr() for layer in kept.packed for t in layer.tensors()]
    other = {**batch, "pixel_values": batch["pixel_values"].flip(0)}
    want = model.generate(**other, **EAGER, max_new_tokens=12)
    assert torch.equal(model.generate(**other, **loop(backend), max_new_tokens=12), want)
    assert [*model._mmqc_loop.packed.values()] == [kept]
    assert [t.data_ptr() for layer in kept.packed for t in layer.tensors()] == places, "as CUDA graphs need it"


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_compiled_loop__a_kept_cache_has_room_for_more_text_than_the_last_prompt_had(name: str) -> None:
    """Fewer of the tokens are visual, so the same length takes more room for text: without it a step writes beside the cache."""
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1)
    attach(model, SPECS[name])
    backend, _ = counting()
    ids = torch.randint(5, 20, batch["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for prompt in (batch, text, batch, text):
        want = model.generate(**prompt, **EAGER, max_new_tokens=24)
        assert torch.equal(model.generate(**prompt, **loop(backend), max_new_tokens=24), want)


@pytest.mark.slow
@pytest.mark.parametrize("images", [True, False])
def test_compiled_loop__a_step_for_any_number_of_prompts_and_of_tokens(without_inductor: None, images: bool) -> None:
    """Two programs, of one prompt and of several: rows, lengths, images and with them the packed words differ in every call."""
    torch._dynamo.reset()
    model, _ = tiny_qwen2_vl(depth=1)
    attach(model, KVSpec(8))  # with few bits, all words of a small image are one, which is a size of its own
    draw, more = random.Random(7), {"do_sample": False, "custom_generate": mmqc.compiled_loop}
    with collect_records() as records:
        for prompts in (3, 1, 5, 2, 1, 4):
            batch = drawn(draw, prompts)
            if not images:
                ids = batch["input_ids"] % 64 + 5
                batch = {"input_ids": ids, "attention_mask": batch["attention_mask"]}
            tokens = draw.randint(4, 9)
            want = model.generate(**batch, **EAGER, max_new_tokens=tokens)
            assert torch.equal(model.generate(**batch, **more, max_new_tokens=tokens), want)
    assert len(records) == 2


def test_compiled_loop__a_cache_of_the_caller(without_inductor: None) -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1)
    spec, length = KVSpec(8), batch["input_ids"].shape[1] + 5
    want = model.generate(**batch, **EAGER, max_new_tokens=5, past_key_values=QuantizedCache(model, spec))
    cache = QuantizedCache(model, spec, max_cache_len=length)
    more = {"max_new_tokens": 5, "do_sample": False, "custom_generate": mmqc.compiled_loop}
    with collect_records() as records:
        got = model.generate(**batch, **more, past_key_values=cache)
    assert torch.equal(got, want)
    assert len(records) == 1, "the step; the prompt runs eagerly"
    assert int(cache.get_seq_length()) == length - 1


def test_compiled_loop__refuses_what_it_cannot_do() -> None:
    model, batch = tiny_qwen2_vl(depth=1)
    spec, more = KVSpec(8), {"max_new_tokens": 2, "do_sample": False, "custom_generate": mmqc.compiled_loop}
    for options, cache, message in (
        ({}, QuantizedCache(model, spec), "give it a max_cache_len"),
        ({}, QuantizedCache(model, spec, max_cache_len=99, offloading=True), "QuantizedCache in host memory"),
        ({"prefill": "graphs"}, QuantizedCache(model, spec, max_cache_len=99), "how many tokens of the prompt are visual"),
        ({"num_beams": 2}, QuantizedCache(model, spec, max_cache_len=99), "2 beams"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**batch, **more, **options, past_key_values=cache)


def test_generate__a_cache_that_grows_is_not_compiled() -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1)
    backend, graphs = counting()
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True  # type: ignore[assignment]
    cache = QuantizedCache(model, KVSpec(8))
    model.generate(**batch, do_sample=False, compile_config=config, max_new_tokens=3, past_key_values=cache)
    assert not graphs
