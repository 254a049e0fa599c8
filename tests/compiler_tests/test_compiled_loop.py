"""mmqc.compiled_loop against transformers' own loop: the same tokens, a kept cache, no more graphs."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from often import often
from quantized_vlm import quantized_vlm
from tolerance import assert_close
from transformers import CompileConfig
from transformers.generation import BaseStreamer

import mmqc
from mmqc.compiler import compiled_loop as loop
from mmqc.compiler import head_start
from mmqc.compiler.record import collect_records
from mmqc.front import sizes


def compiled(backend: Any = "eager") -> dict[str, Any]:
    """How to compile without Inductor: what is tested is the loop."""
    return {"compile_config": CompileConfig(backend=backend, mode=None), "custom_generate": mmqc.compiled_loop}


HOW = {
    "greedy": {"do_sample": False},
    "with an end of sequence": {"do_sample": False, "eos_token_id": [5, 9, 20], "pad_token_id": 0},
    "a processor": {"do_sample": False, "repetition_penalty": 1.5},
    "sampled": {"do_sample": True, "top_k": 20},
    "scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
}
LEAST = {"do_sample": False, "min_new_tokens": 3, "eos_token_id": [*range(1, 60)], "pad_token_id": 0}  # half of the tokens end it
HOW |= {"a least length": LEAST, "a least length, logits": {**HOW["scores"], **LEAST, "output_logits": True}}


@pytest.mark.parametrize("how", often(HOW, "greedy", "a least length, logits"))
def test_compiled_loop__gives_the_same_tokens_as_transformers(how: str) -> None:
    model, batch = quantized_vlm(depth=1)
    more = {"max_new_tokens": 6, "cache_implementation": "static", **HOW[how]}
    torch.manual_seed(3)
    expected = model.generate(**batch, **more)
    for _ in range(2):  # with a new cache and with the kept one
        torch.manual_seed(3)
        got = model.generate(**batch, **more, **compiled())
        if not isinstance(got, torch.Tensor):
            assert torch.equal(got.sequences, expected.sequences)
            for step, other in zip((*got.scores, *(got.logits or ())), (*expected.scores, *(expected.logits or ())), strict=True):
                assert_close(step, other)
        else:
            assert torch.equal(got, expected)


def test_compiled_loop__eager_prefill(without_inductor: None) -> None:
    model, batch = quantized_vlm(depth=1)
    more = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    with collect_records() as records:
        got = model.generate(**batch, **more, custom_generate=mmqc.compiled_loop, prefill="eager")
    assert len(records) == 1, "the step"
    assert torch.equal(got, model.generate(**batch, **more))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "varying"), [("graphs", False), (None, True)])
def test_compiled_loop__sizes_of_few_shapes_are_constants(
    prefill: str | None, varying: bool, monkeypatch: pytest.MonkeyPatch, without_inductor: None
) -> None:
    model, batch = quantized_vlm(depth=1, layers=1)
    marked: list[torch.Tensor] = []
    monkeypatch.setattr(sizes, "may_vary", lambda tensor, *_: marked.append(tensor) or (lambda: None))
    more = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    got = model.generate(**batch, **more, custom_generate=mmqc.compiled_loop, prefill=prefill)
    assert torch.equal(got, model.generate(**batch, **more))
    assert bool(marked) == varying


@pytest.mark.slow
def test_compiled_loop__knows_what_generate_was_given_before_anything_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = quantized_vlm(depth=1, layers=1)
    seen: list[Any] = []
    prepare = type(model)._prepare_generation_config

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = head_start.CURRENT.get()
        seen.append(current and ({*current.given}, all(current.given[k] is batch[k] for k in current.given if k in batch)))
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "_prepare_generation_config", watched)
    more = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "static"}
    first, how = batch["input_ids"], compiled()  # which imports what watches ``generate``
    rest = {k: v for k, v in batch.items() if k != "input_ids"}
    got = model.generate(first, **rest, **more, **how)
    assert torch.equal(got, model.generate(**batch, **more))
    assert seen == [({*batch}, True), None]
    assert head_start.CURRENT.get() is None
    with pytest.raises(ValueError, match="prefill = 'no'"):
        model.generate(**batch, **more, **compiled(), prefill="no")
    assert head_start.CURRENT.get() is None


def test_compiled_loop__left_padded_batch() -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    ids = torch.tensor([[0, 0, 0, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
    text = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    more = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(model.generate(**text, **more, **compiled()), model.generate(**text, **more))


def test_compiled_loop__prefill_and_step_are_one_graph_each(without_inductor: None) -> None:
    model, batch = quantized_vlm(depth=1)
    more = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "custom_generate": mmqc.compiled_loop}
    text = torch.randint(1, 30, (1, 60), generator=torch.Generator().manual_seed(1))
    seen = []
    with collect_records() as records:
        for length in (12, 30, 60, 40, 17):
            assert model.generate(input_ids=text[:, :length], **more).shape[1] == length + 4
            seen.append(len(records))
        assert seen == [2] * 5, "a prefill and a step for every length"
        with_images = [model.generate(**batch, **more) for _ in range(2)]
        assert len(records) == 4, "a prefill with images, and a step that is given the kinds of tokens"
    assert all(record.quantized for record in records)
    del more["custom_generate"]
    assert all(torch.equal(model.generate(**batch, **more), got) for got in with_images)


@pytest.mark.slow
def test_compiled_loop__batches_in_any_order_compile_a_few_times(without_inductor: None) -> None:
    """A prefill and a step for one prompt and for several, of any number and lengths, in a cache of any length."""
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    more = {"do_sample": False, "cache_implementation": "static"}
    draw = torch.Generator().manual_seed(3)

    def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 30, (rows, length), generator=draw)
        mask = torch.ones_like(ids)
        mask[: rows // 2, :3] = 0
        return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}

    calls = [
        (batch(rows, length), new)
        for rows, length, new in ((1, 20, 3), (3, 12, 5), (16, 90, 2), (2, 30, 4), (1, 200, 9), (5, 33, 7))
    ]
    with collect_records() as records:
        got = [model.generate(**b, **more, max_new_tokens=n, custom_generate=mmqc.compiled_loop) for b, n in calls]
    assert len(records) == 4
    assert all(
        torch.equal(model.generate(**b, **more, max_new_tokens=n), tokens) for (b, n), tokens in zip(calls, got, strict=True)
    )


@pytest.mark.slow
def test_compiled_loop__keeps_the_cache_and_a_copy_of_the_model_does_not() -> None:
    model, batch = tiny_qwen2_vl(depth=1, layers=1)
    more = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", **compiled()}
    first = model.generate(**batch, **more)
    (kept,) = (k.cache for k in model._mmqc_loop.caches.caches.values())
    assert torch.equal(model.generate(**batch, **more), first)
    assert [k.cache for k in model._mmqc_loop.caches.caches.values()] == [kept]
    assert not copy.deepcopy(model)._mmqc_loop.caches.caches
    returned = model.generate(**batch, **more, return_dict_in_generate=True)
    assert returned.past_key_values is not kept, "a cache that the caller gets is the caller's"
    assert model._compiled_call_impl is None


def test_compiled_loop__refuses_what_it_cannot_do() -> None:
    model, batch = tiny_qwen2_vl(depth=1)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(**batch, max_new_tokens=2, custom_generate=mmqc.compiled_loop)
    with pytest.raises(ValueError, match="'compiled', 'recorded', 'graphs', 'eager'"):
        model.generate(**batch, max_new_tokens=2, cache_implementation="static", prefill="fast", **compiled())
    with pytest.raises(ValueError, match="of backend 'mmqc', not of 'inductor'"):
        model.generate(**batch, max_new_tokens=2, cache_implementation="static", prefill="recorded", **compiled("inductor"))
    with pytest.raises(ValueError, match="not with 2 beams: leave num_beams or custom_generate out"):
        model.generate(**batch, max_new_tokens=2, num_beams=2, cache_implementation="static", **compiled())
    with pytest.raises(ValueError, match="not without a cache: leave use_cache=False or custom_generate out"):
        model.generate(**batch, max_new_tokens=2, use_cache=False, cache_implementation="static", **compiled())


class Tokens(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("where", ["among the options", "beside them"])
def test_compiled_loop__a_mode_is_the_steps_alone(where: str) -> None:
    """Graphs of a size, for a prompt of any size, would take its replays away."""
    options = {"token_order": "sequence"}
    config = CompileConfig(backend="mmqc", mode=None, options={"mode": "reduce-overhead", **options})
    if where == "beside them":
        config = CompileConfig(backend="mmqc", mode="reduce-overhead", options=options)
    step, prompt = loop._without_guards(config, SimpleNamespace(options={"layers": 3}))
    assert step.options == {"mode": "reduce-overhead", "token_order": "sequence", "layers": 3}
    assert step.mode is None
    assert prompt == {"token_order": "sequence", "layers": 3}


def test_compiled_loop__graphs_by_inductors_name_are_the_steps_alone() -> None:
    options = {"triton.cudagraphs": True, "token_order": "sequence"}
    config = CompileConfig(backend="mmqc", mode=None, options=options)
    step, prompt = loop._without_guards(config, SimpleNamespace(options={"layers": 3}))
    assert step.options == {**options, "layers": 3}
    assert prompt == {"token_order": "sequence", "layers": 3}


@pytest.mark.slow
def test_compiled_loop__a_streamer_gets_every_token_and_is_ended() -> None:
    model, batch = quantized_vlm(depth=1, layers=1)
    assert len(batch["input_ids"]) == 1, "a stream is of one sequence"
    more = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected, got = Tokens(), Tokens()
    model.generate(**batch, **more, streamer=expected)
    model.generate(**batch, **more, **compiled(), streamer=got)
    assert got.tokens == expected.tokens
    assert got.ended == expected.ended == 1
    wrapped, through = Tokens(), {**compiled(), "custom_generate": lambda *args, **kwargs: mmqc.compiled_loop(*args, **kwargs)}
    model.generate(**batch, **more, **through, streamer=wrapped)
    assert wrapped.tokens == expected.tokens
    refused = Tokens()
    with pytest.raises(ValueError, match="static or quantized cache"):
        model.generate(**batch, max_new_tokens=4, custom_generate=mmqc.compiled_loop, streamer=refused)
    assert refused.ended == 1, "a reader of a stream that is not ended waits for ever"


@pytest.mark.slow
def test_compiled_loop__threads_take_turns() -> None:
    model, _ = quantized_vlm(depth=1, layers=1)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 20, shape, generator=draw) for shape in ((1, 6), (2, 6), (1, 9), (2, 3), (1, 6))]
    more = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static", **compiled()}
    ask = lambda ids: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **more)  # noqa: E731
    for ids in prompts:
        ask(ids)
    expected = [ask(ids) for ids in prompts]
    logits = model(input_ids=prompts[0]).logits

    def work(number: int) -> bool:
        right = all(torch.equal(ask(prompts[i % 5]), expected[i % 5]) for i in range(number, number + 4))
        return right and torch.equal(model(input_ids=prompts[0]).logits, logits)  # nor does a plain call meet another's prompt

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_compiled_loop__waits_for_the_last_calls_stream_before_it_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = quantized_vlm(depth=1)
    order, ready = [], loop.KeptCaches.ready
    monkeypatch.setattr(loop.Streams, "follow", lambda self, devices: order.append("streams"))
    monkeypatch.setattr(loop.KeptCaches, "ready", lambda self, *a, **k: order.append("cache") or ready(self, *a, **k))
    model.generate(**batch, max_new_tokens=2, do_sample=False, cache_implementation="static", **compiled())
    assert order[:2] == ["streams", "cache"]
