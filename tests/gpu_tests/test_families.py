"""Families of transformers on a GPU: compiled as eager, and ``compiled_loop`` as transformers' own loop, in mixed order."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
from float64 import relative_error
from torch import Tensor, nn
from transformers import GenerationConfig

import mmqc
from mmqc import recipes
from tests.families import encoder_decoder, grids, images  # noqa: F401  their builders enter themselves
from tests.families.known import COMPILED, LOOP_MISSES, NO_TOKENS, expected_of
from tests.families.parts import FAMILIES, Batch

pytestmark = pytest.mark.gpu

FLIPS = 0.1  # of logits: rounded values on the edge between two codes, in models so small
TIE = 0.3  # of the deviation of logits: what such a value makes of two of them; where a cache was wrong it was 1.1
NEW = 9


def on_device(name: str, bits: int) -> tuple[Any, Batch]:
    """A family's model in integers, and its batch."""
    model, batch = FAMILIES[name]()
    model.to("cuda")
    batch = {key: value.to("cuda") if isinstance(value, Tensor) else value for key, value in batch.items()}
    mmqc.quantize_(model, recipes.mquant(weight_bits=bits, solver="rtn"), [batch], progress=False)
    return model, batch


@torch.no_grad()
def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled__computes_the_same(name: str) -> None:
    model, batch = on_device(name, 8)
    eager = logits(model, batch)
    model.compile(backend="mmqc")
    with expected_of(name, COMPILED):
        for _ in range(2):
            assert relative_error(logits(model, batch), eager) < FLIPS


def below_the_best(got: Tensor, expected: Tensor, scores: tuple[Tensor, ...]) -> float:
    """How far the first other token of each sequence lay below the best, in deviations of the logits."""
    behind = 0.0
    for row, (said, best) in enumerate(zip(got[:, -NEW:].tolist(), expected[:, -NEW:].tolist(), strict=True)):
        for at, (token, other) in enumerate(zip(said, best, strict=True)):
            if token != other:
                of = scores[at][row].float()
                behind = max(behind, ((of[other] - of[token]) / of.std()).item())
                break
    return behind


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NO_TOKENS])
def test_loop__gives_the_tokens_of_transformers(name: str) -> None:
    model, batch = on_device(name, 4)
    tokens = torch.randint(1, 30, (3, 19), device="cuda")
    text = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    text["attention_mask"][0, :4] = 0
    one = {key: value[1:2, 8:] for key, value in text.items()}
    pixels = inspect.signature(type(model).generate).parameters.get("pixel_values")
    prompts = [batch] * 3 if pixels and pixels.default is pixels.empty else [batch, one, batch, text, one, batch]
    plain = GenerationConfig(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    static = GenerationConfig(**{**plain.to_diff_dict(), "cache_implementation": "static"})
    miss = LOOP_MISSES.get(name)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError, IndexError), match=miss) if miss else contextlib.nullcontext():
        for prompt in prompts:
            expected = model.generate(**prompt, generation_config=plain, output_logits=True, return_dict_in_generate=True)
            got = model.generate(**prompt, generation_config=static, custom_generate=mmqc.compiled_loop)
            assert below_the_best(got, expected.sequences, expected.logits) < TIE
