"""A decoder's attention, observed: its operands are shown, it computes what it did, and two threads share nothing."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from threads import in_step
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mmqc.calibration.observe import observe
from mmqc.config import KVRounding, KVSpec
from mmqc.kv import rounding as kv_rounding
from mmqc.kv import scores as kv_scores
from mmqc.kv.attention_calls import AttentionCalls
from mmqc.kv.cache import prepare
from mmqc.kv.calibrate import observe_queries
from mmqc.kv.query_moment import moment_of

LAST = "model.language_model.layers.1.self_attn"


class Calls(list[Any]):
    def update(self, *operands: Any) -> None:
        self.append(operands)


def names() -> tuple[list[str], list[str]]:
    return sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)


@torch.no_grad()
def test_attention_calls__show_the_operands_and_change_nothing() -> None:
    model, batch = tiny_qwen2_vl()
    text, known = model.model.language_model.config, names()
    expected = model(**batch, use_cache=False).logits
    with observe(model, {AttentionCalls("sdpa"): Calls()}) as seen:
        assert text._attn_implementation not in known[0]
        assert torch.equal(model(**batch, use_cache=False).logits, expected)
    (calls,) = seen.values()
    layers = [m for n, m in model.named_modules() if n.endswith("self_attn")]
    assert [module for module, *_ in calls] == layers
    length = batch["input_ids"].shape[1]
    for _, query, key, scaling in calls:
        assert (query.shape, key.shape) == ((1, 6, length, 16), (1, 2, length, 16))
        assert scaling == 16**-0.5
    assert (text._attn_implementation, names()) == ("sdpa", known)


def test_attention_calls__take_the_name_back_after_an_error() -> None:
    model, batch = tiny_qwen2_vl()
    known = names()
    with pytest.raises(KeyError, match="missing"), observe(model, {AttentionCalls("missing"): Calls()}):
        pass

    def fail(*operands: Any) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), observe(model, {AttentionCalls("sdpa"): fail}):
        model(**batch)
    assert (model.model.language_model.config._attn_implementation, names()) == ("sdpa", known)


def scores(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    return [t for layer in kv_scores.observe(model, [batch]).layers.values() for q, k, _ in layer for t in (q, k)]


@torch.no_grad()
def keys(model: nn.Module, batch: dict[str, Tensor], basis: Any = "principal") -> list[Tensor]:
    with kv_rounding.observed(model, KVRounding(basis=basis)) as moments:
        for _ in range(2):
            model(**batch, use_cache=False)
    return list(moments.values())


peaks = functools.partial(keys, basis="peaks")


@torch.no_grad()
def queries(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    observe_queries(model, KVSpec(1, rounding="queries"), [batch], prepare(model))
    return [m for m in map(moment_of, model.modules()) if m is not None]


@pytest.mark.parametrize(("one", "two"), [(scores, scores), (keys, keys), (keys, peaks), (queries, queries), (scores, queries)])
def test_calibrations__in_two_threads_do_not_mix(one: Callable, two: Callable) -> None:
    given = [tiny_qwen2_vl(), tiny_qwen2_vl(grids=((1, 4, 4),))]
    alone = [run(*copy.deepcopy(case)) for run, case in zip((one, two), given, strict=True)]
    runs = [functools.partial(run, *case) for run, case in zip((one, two), given, strict=True)]
    together = in_step(runs, [model for model, _ in given], LAST)
    for found, expected in zip(together, alone, strict=True):
        assert len(expected) >= 2
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert alone[0][0].shape != alone[1][0].shape or not torch.equal(alone[0][0], alone[1][0])
