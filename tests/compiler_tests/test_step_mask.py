"""A step that goes on with the last one's mask: the one that transformers makes, and who is left alone."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from quantized_vlm import quantized_vlm
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.generation import utils as generation

import mmqc
from mmqc.compiler import step_mask
from mmqc.compiler.step_mask import masks_go_on
from mmqc.versions import cache_name

MORE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
pytestmark = pytest.mark.usefixtures("without_inductor")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that transformers made, and those that steps got, copied."""
    masks: list[Any] = []
    mask = step_mask._Loop.mask

    def keep(self: Any, seen: int, make: Callable[[], Any]) -> Any:
        want, got = make(), mask(self, seen, make)
        masks.append((want, {kind: m.clone() for kind, m in got.items()} if isinstance(got, dict) else got.clone()))
        return got

    monkeypatch.setattr(step_mask._Loop, "mask", keep)
    # Where all inputs go on, transformers is not asked for a mask at all (test_step_inputs.py).
    monkeypatch.setattr("mmqc.compiler.compiled_loop.inputs_go_on", lambda *_: nullcontext())
    return masks


def assert_same(made: list[Any], count: int) -> None:
    assert len(made) == count
    for want, got in made:
        pairs = [(want[kind], got[kind]) for kind in want] if isinstance(want, dict) else [(want, got)]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def test_step_mask__is_the_one_of_transformers(made: list[Any]) -> None:
    model, batch = quantized_vlm(depth=1)
    expected = model.generate(**batch, **MORE)
    assert not made
    for _ in range(2):
        assert torch.equal(model.generate(**batch, **MORE, custom_generate=mmqc.compiled_loop), expected)
    assert_same(made, 2 * 5)


def test_step_mask__of_a_quantized_cache_stays(made: list[Any]) -> None:
    _, batch = quantized_vlm(depth=1)
    model, _ = tiny_qwen2_vl(depth=1)
    mmqc.quantize_(model, mmqc.recipes.calibquant(4), [batch], progress=False)
    more = {name: value for name, value in MORE.items() if name != "cache_implementation"}
    expected = model.generate(**batch, **more)
    for _ in range(2):
        assert torch.equal(model.generate(**batch, **more, custom_generate=mmqc.compiled_loop), expected)
    assert_same(made, 2 * 5)
    assert all(next(iter(got.values())).shape[-1] == 1 for _, got in made)


@pytest.mark.slow
def test_step_mask__padding_on_the_left(made: list[Any]) -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    ids = torch.tensor([[0, 0, 0, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
    text = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    assert torch.equal(model.generate(**text, **MORE, custom_generate=mmqc.compiled_loop), model.generate(**text, **MORE))
    assert_same(made, 5)


@pytest.mark.slow
def test_step_mask__chunks_of_a_padded_prompt(made: list[Any]) -> None:
    """One token at a time may be padding: those masks are transformers'."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None)).eval()
    ids = torch.tensor([[0, 0, 0, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
    text = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pad_token_id": 0, "prefill_chunk_size": 1}
    expected = model.generate(**text, **MORE)
    assert torch.equal(model.generate(**text, **MORE, custom_generate=mmqc.compiled_loop), expected)
    assert not made


@pytest.mark.slow
def test_step_mask__is_made_once_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    mask = step_mask._Loop.mask

    def count(self: Any, seen: int, make: Callable[[], Any]) -> Any:
        return mask(self, seen, lambda: calls.append(seen) or make())

    monkeypatch.setattr(step_mask._Loop, "mask", count)
    model, batch = quantized_vlm(depth=1)
    model.generate(**batch, **MORE, custom_generate=mmqc.compiled_loop)
    assert calls == [batch["input_ids"].shape[1] + 1]


def asked(model: Any, cache: StaticCache, **more: Any) -> dict[str, Any]:
    """What ``generate`` asks of a step."""
    step = {
        "config": model.config,
        "inputs_embeds": torch.empty(1, 1, 0),
        "attention_mask": torch.ones(1, 4, dtype=torch.long),
        cache_name(): cache,
        "position_ids": torch.full((1, 1), 3),
        "is_first_iteration": False,
    }
    return step | more


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"inputs_embeds": torch.empty(1, 2, 0)}, {}),
        ({"block_sequence_ids": torch.zeros(1, 1)}, {}),
        ({cache_name(): None}, {}),
        ({}, {"layer_types": ["full_attention", "sliding_attention"]}),
        ({}, {"layer_types": None, "sliding_window": 4}),
        ({}, {"_attn_implementation": "eager"}),
    ],
)
def test_step_mask__leaves_other_calls_to_transformers(more: dict[str, Any], text: dict[str, Any]) -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    cache = StaticCache(config=model.config, max_cache_len=8)
    names = ("layer_types", "sliding_window", "_attn_implementation")
    config = SimpleNamespace(**({n: getattr(model.config.get_text_config(), n, None) for n in names} | text))
    config.get_text_config = lambda: config
    plain = asked(model, cache)
    plain.pop("is_first_iteration")
    assert step_mask._is_plain_step(step_mask._Loop(cache), **plain)
    assert not step_mask._is_plain_step(step_mask._Loop(cache), **{**plain, "config": config, **more})


def test_step_mask__places_of_steps_without_a_mask_of_padding() -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    cache = StaticCache(config=model.config, max_cache_len=8)
    plain = asked(model, cache, attention_mask=None)
    assert not step_mask._is_plain_step(step_mask._Loop(cache), **plain)
    loop = step_mask._Loop(cache, prompt=6)
    first = torch.arange(8).lt(7)[None, None, None]
    assert step_mask._is_plain_step(loop, **plain)
    assert loop.mask(loop.place(None), lambda: first.clone()).sum() == 7
    assert loop.mask(loop.place(None), lambda: first.clone()).sum() == 8
    assert not step_mask._is_plain_step(loop, **plain), "the cache is full"


def test_step_mask__only_inside_a_loop() -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    cache = StaticCache(config=model.config, max_cache_len=8)
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    masks = []
    for _ in range(2):
        with masks_go_on(cache):
            masks += [generation.create_masks_for_generate(**asked(model, cache)) for _ in range(2)]
        masks.append(generation.create_masks_for_generate(**asked(model, cache)))
    assert len({id(m) for m in masks}) == len(masks), "none is of the token behind the last one"
